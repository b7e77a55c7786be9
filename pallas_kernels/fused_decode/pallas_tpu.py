"""A decode step for TPU: every block of keys and values is read once, and only the changed tile is copied back.

The running softmax starts from the new token, and the slot that the token takes is masked: blocks are read unchanged.
The tile of that slot is taken from the block that is in VMEM anyway, and a later block of heads awaits the copy back.
The grid is (cores, blocks of heads of some rows, splits of slots). No copy crosses the first axis, which the cores of a
two-core chip share.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels import operands
from pallas_kernels.blocks import alias_block, arrays, input_block, output_block, run
from pallas_kernels.common import LANES, SUBLANES, over_cores, padded, row_and_block, slots_lie_along_lanes, tpu_params
from pallas_kernels.decode_attention import ScoreNoise, online_softmax
from pallas_kernels.decode_attention.api import Decoded
from pallas_kernels.decode_attention.kernel_parts import array_and_scale, channels_of, multiplies_integers
from pallas_kernels.decode_attention.pallas_tpu import VMEM_BYTES, block_factor, tile
from pallas_kernels.evict.pallas_tpu import dtype_32_bits, slots_per_copy
from pallas_kernels.evict.reference import write_slots
from pallas_kernels.fused_decode.api import FusedDecode, FusedResult, Hashed, Ranking, Slots
from pallas_kernels.fused_decode.kernel import CacheOutput, ChangedTile, Inputs, NewEntry, Scratch, StepOutputs, kernel
from pallas_kernels.hamming import Hashing
from pallas_kernels.hamming.hashing import WORD
from pallas_kernels.operands import Operand, Quantised
from pallas_kernels.ranking import EvictionRules


def fused_decode(x: FusedDecode, *, interpret: Any) -> FusedResult:
    (_, k, v, buffers), (_, new_k, new_v, entry), query = x.slots, x.token, x.query
    (b, h, g, d), (c, e) = query.q.shape, v.shape[2:]
    heads, slots = blocks_of(k, v)
    blocks, channels = h // heads, (channels_of(k), channels_of(v))
    cores, units = over_cores(b * blocks)
    sets, rows = online_softmax.rows_and_blocks(heads, g)
    parts = _StepLayout(heads, g, slots, lambda core, step, split: (*row_and_block(core, step, units, blocks), split))
    attention = parts.inputs(x.attention(x.slots), parts.of_heads(c))
    noise = attention.score_noise
    requested = "sum" if isinstance(query.scores, ScoreNoise) else query.scores
    entries = [parts.entry(*arguments) for arguments in zip((k, v), (new_k, new_v), channels, strict=True)]
    inputs = Inputs(attention, parts.ranking(x.ranking, c), *entries)
    importance = inputs.ranking.importance

    tiles, after = [], []
    for cache, placed_cache, new, axis in zip((k, v), (attention.k, attention.values), entries, channels, strict=True):
        array, (cache_block, scale) = array_and_scale(cache)[0], array_and_scale(placed_cache)
        width = array.shape[-1]
        shape = (width, LANES) if axis == 1 else (slots_per_copy(array), width)
        narrow = new.stored.array.dtype != dtype_32_bits(array.dtype)  # single rows can only be read in 32 bits
        tiles.append(
            ChangedTile(
                pltpu.VMEM((heads, *shape), array.dtype),
                pltpu.VMEM((heads, width), dtype_32_bits(array.dtype)) if narrow else None,
                pltpu.VMEM((heads, 1), jnp.float32) if scale is not None and new.scale is None else None,
            )
        )
        evicted = output_block(new.stored.array.shape, new.stored.spec, dtype_32_bits(array.dtype)) if x.pairs else None
        scale = None if scale is None else alias_block(scale, dtype=jnp.float32)
        after.append(CacheOutput(alias_block(cache_block, pl.BlockSpec(memory_space=pl.ANY)), scale, evicted))
    lanes = 1 if sets < heads else rows
    outputs = StepOutputs(
        out=output_block((b, h * g, e), parts.of_queries(e), query.q.dtype if x.rounds else jnp.float32),
        lse=output_block((b, h, lanes), parts.of_heads(lanes)),
        slot=output_block((b, h, 1), parts.of_heads(1), jnp.int32),
        evicted_position=output_block((b, h, 1), parts.of_heads(1), jnp.int32),
        position=alias_block(attention.position),
        k=after[0],
        v=after[1],
        codes=tuple(map(alias_block, importance.codes)) if isinstance(importance, Hashed) else (),
    )
    scored = requested is not None
    scratch = Scratch(
        running=online_softmax.RunningAttention.scratch(
            sets, rows, e=e, noisy=noise is not None, slots=c if scored else None
        ),
        slot=pltpu.VMEM((heads, 1), jnp.int32),
        slots=pltpu.SMEM((heads,), jnp.int32),
        k=tiles[0],
        v=tiles[1],
        sent=pltpu.SemaphoreType.DMA((2,)),
        new=pltpu.VMEM((sets, rows, 1), jnp.float32) if scored else None,
    )
    if scored:
        shape = (g, c) if requested == "each" and sets == heads else (c,)
        scores = alias_block(importance) if x.adds else output_block((b, h, *shape), parts.of_heads(*shape))
        outputs = outputs._replace(scores=scores)

    body = functools.partial(
        kernel,
        units=units,
        blocks=blocks,
        slots=slots,
        channels=channels,
        requested=requested,
        adds=x.adds,
        integers=multiplies_integers(interpret),
    )
    results = run(
        body,
        (inputs,),
        outputs,
        grid=(cores, units, c // slots),
        scratch_shapes=[scratch],
        compiler_params=tpu_params(1, 2, VMEM_BYTES * block_factor()),
        interpret=interpret,
        # XLA prefetches weights during operations with a high cost estimate.
        cost_estimate=pl.CostEstimate(
            flops=4 * b * h * g * c * d,
            transcendentals=b * h * g * c,
            bytes_accessed=sum(y.size * y.dtype.itemsize for y in jax.tree.leaves(arrays(inputs))),
        ),
        name="fused_decode",
    )
    slot = results.slot[..., 0]

    def write(leaf: Array, value: Array) -> Array:
        # Slot by slot, so that XLA fuses it with the score's next update of its buffers.
        return write_slots(leaf, slot, value)

    def updated_operand(after: CacheOutput, axis: int) -> Operand:
        array = after.cache if axis == 2 else after.cache.swapaxes(2, 3)
        return array if after.scale is None else Quantised(array, after.scale)

    def evicted_entry(after: CacheOutput, old: Operand) -> Operand:
        array = after.evicted.reshape(b, h, -1)
        if not isinstance(old, Quantised):
            return array
        is_victim = jnp.arange(c) == slot[..., None]
        return Quantised(array.astype(after.cache.dtype), jnp.where(is_victim, old.scale, 0.0).sum(-1))

    scores = results.scores.reshape(b, h, g, c) if requested == "each" else results.scores
    attended = Decoded(results.out.reshape(b, h, g, e), results.lse[:, :, :g], scores)
    pair = updated_operand(results.k, channels[0]), updated_operand(results.v, channels[1])
    new_slots = Slots(results.position, *pair, jax.tree.map(write, buffers, entry))
    evicted = (evicted_entry(results.k, k), evicted_entry(results.v, v)) if x.pairs else None
    return FusedResult(attended, slot, results.evicted_position[..., 0], new_slots, evicted, results.codes or None)


class _StepLayout(online_softmax.BlockLayout):
    # Parts of the slots, and of what else a step of the grid (core, unit of the core, split of slots) gets.

    def per_head(self, x: Array) -> Any:
        """Place one number of each head, [b h]: rows are along the lanes, as XLA stores few heads of many rows."""

        def index(*step: Any) -> tuple[Any, Any]:
            row, which, _ = self.place(*step)
            return which, row // LANES

        return input_block(x.T, pl.BlockSpec((self.heads, min(len(x), LANES)), index))

    def entry(self, cache: Operand, new: Array, channels: int) -> NewEntry:
        """Place new keys or values."""
        array, turns = array_and_scale(cache)[0], channels == 1
        width, d = array.shape[-1], new.shape[-1]
        entry, coded, scale = new, new, None
        if isinstance(cache, Quantised) and (turns or cache.bits < 8):  # otherwise the kernel computes the codes
            coded = operands.quantise(new, cache.bits)
            entry, scale = coded.codes, self.per_head(coded.scale)
        if turns:
            stored = input_block(entry.astype(dtype_32_bits(entry.dtype))[..., None], self.of_heads(width, 1))
        else:
            stored = input_block(in_registers(entry, self.heads), self.of_heads(width))
        separate = turns or width < d  # attention needs its numbers in another layout
        numbers = input_block(operands.values(coded, jnp.float32), self.of_heads(d)) if separate else None
        return NewEntry(stored, scale, numbers)

    def ranking(self, ranking: Ranking, c: int) -> Ranking:
        """Place what the token's slot is chosen by, for c slots."""
        importance = ranking.importance
        rules = (y.astype(jnp.int32) for y in ranking.protection)
        protection = EvictionRules(
            *(self.per_head(y) if y.ndim else input_block(y[None], online_softmax.SCALARS) for y in rules)
        )
        keep = None if ranking.keep is None else input_block(ranking.keep.astype(jnp.int32), self.of_heads(c))
        if isinstance(importance, Hashed):
            planes, queries, keys = importance.hashing
            (bits, width), b = planes.shape[1:], len(queries)
            importance = Hashed(
                Hashing(
                    input_block(planes.astype(jnp.float32), self.of_block(self.heads, bits, width)),
                    input_block(queries.reshape(b, -1, width), self.of_queries(width)),
                    input_block(in_registers(keys[:, :, 0], self.heads), self.of_heads(width)),
                ),
                tuple(input_block(code, self.of_heads(c)) for code in importance.codes),
            )
        elif importance is not None:
            importance = input_block(importance.astype(jnp.float32), self.of_heads(c))
        return Ranking(importance, protection, keep, ranking.shrinks)


def unit(array: Array) -> int:
    """Return the slots of one copy back: a tile of keys or values [b h c w], or two."""
    return LANES if slots_lie_along_lanes(*array.shape[2:]) else slots_per_copy(array)


def in_registers(entry: Array, heads: int) -> Array:
    """Return new keys or values [b h w] for the kernel's blocks of `heads` heads.

    Narrow dtypes must fill whole registers. XLA would have to change the layout of fewer heads, so those are converted
    to 32 bits.
    """
    fills = entry.dtype == jnp.bfloat16 and heads % SUBLANES == 0
    return entry if fills else entry.astype(dtype_32_bits(entry.dtype))


def blocks_of(k: Operand, v: Operand) -> tuple[int, int]:
    """Return the KV heads and slots of one grid step.

    The slots of a step divide the cache's, since inputs that alias the cache must not be read beyond its end.
    """
    (_, h, c, d), e = k.shape, v.shape[3]
    heads, max_slots = tile(h, c, max(d, e), min(array_and_scale(x)[0].dtype.itemsize for x in (k, v)))
    sizes = range(max_slots // LANES * LANES, max_slots // 4, -LANES)
    return heads, next((slots for slots in sizes if c % slots == 0), c)


def block_bytes(q: Array, k: Operand, v: Operand, scores: str | ScoreNoise | None, bits: int = 0) -> int:
    """Estimate a step's bytes of VMEM: double-buffered blocks, and scratch memory.

    If slots rank by hash codes, `bits` is their length, and the estimate includes codes and hyperplanes.
    """
    g, c = q.shape[2], v.shape[2]
    arrays = [array_and_scale(x)[0] for x in (k, v)]
    heads, slots = blocks_of(k, v)
    (sets, rows), padded_slots = online_softmax.rows_and_blocks(heads, g), padded(c, LANES)
    rows = sets * rows // heads
    pairs = sum(padded(x.shape[-1], LANES) * x.dtype.itemsize for x in arrays) * padded(slots, LANES)
    # Positions before and after, importance, protected slots, two scales; words before and after.
    of_slots = (6 + 2 * -(-bits // WORD)) * 4 * padded_slots
    score_bytes = 0 if scores is None else 4 * padded_slots * (rows + 2 * (rows if scores == "each" else 1))
    planes = 4 * padded(bits, SUBLANES) * padded(q.shape[3], LANES)
    small_bytes = 4 * LANES * (16 * rows + 4 * LANES)
    return heads * (2 * (pairs + of_slots + planes) + score_bytes + small_bytes)
