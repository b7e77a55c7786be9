"""Decode attention for TPU: slots pass through VMEM once, and logits stay there until they become scores.

The grid is (rows, blocks of heads, splits of slots). The last axis runs in order, so running maxima and sums stay in
scratch memory.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.attention import log_sum, positive
from pallas_kernels.blocks import output_block, run
from pallas_kernels.common import LANES, SUBLANES, VMEM_BYTES, chip, tpu_params
from pallas_kernels.decode_attention import kernel_parts, online_softmax
from pallas_kernels.decode_attention.api import DecodeAttention, Decoded, LowRank, ScoreNoise
from pallas_kernels.decode_attention.kernel_parts import LOWEST
from pallas_kernels.decode_attention.online_softmax import RunningAttention

BLOCK_BYTES = 1 << 20
"""Approximate bytes of keys in one grid step; values take as many, and both are double-buffered."""
HELD_BYTES = 4 << 20
"""Maximum bytes of logits held in VMEM until their row is done; longer rows write them out, and XLA scores them."""
ROOMY = 64 << 20
"""Bytes of VMEM from which blocks and kernels' VMEM are twice as large: v4 has less, later chips have it."""


class AttentionOutputs(NamedTuple):
    """Results of the kernel: blocks of rows are packed, and `lse` has a number for each row of a head's block."""

    out: Any
    lse: Any
    scores: Any = None
    """Requested scores, if their logits fit in VMEM."""
    logits: Any = None
    """Logits, and `scores_lse`, the log-sum-exp to score them with, if they do not fit."""
    scores_lse: Any = None


def decode_attention(x: DecodeAttention, *, interpret: Any) -> Decoded:
    b, h, g, d = x.q.shape
    c, e = x.values.shape[2:]
    itemsize = min(kernel_parts.array_and_scale(y)[0].dtype.itemsize for y in (x.k, x.values))
    heads, slots = tile(h, c, max(d, e), itemsize)
    splits, (blocks, rows) = pl.cdiv(c, slots), online_softmax.rows_and_blocks(heads, g)
    share_registers = blocks < heads
    # With heads that share registers, scores are as large as logits and are held twice.
    score_bytes = 4 * (blocks * rows + (2 * heads if share_registers else 0)) * splits * slots
    kept_slots = splits * slots if x.scores is not None and score_bytes <= HELD_BYTES else None
    requested = "sum" if isinstance(x.scores, ScoreNoise) else x.scores

    parts = online_softmax.BlockLayout(heads, g, slots, lambda b, h, s: (b, h, s))
    inputs = parts.inputs(x, parts.of_slots())
    lse_rows = 1 if share_registers else rows
    lse = output_block((b, h, lse_rows), parts.of_heads(lse_rows))
    outputs = AttentionOutputs(output_block((b, h * g, e), parts.of_queries(e)), lse)
    if kept_slots is not None:
        shape = (g, c) if requested == "each" and not share_registers else (c,)
        outputs = outputs._replace(scores=output_block((b, h, *shape), parts.of_heads(*shape)))
    elif requested is not None:
        several = parts.of_heads(rows, slots, along=1)
        shape, spec = ((c,), parts.of_slots()) if share_registers else ((rows, c), several)
        outputs = outputs._replace(logits=output_block((b, h, *shape), spec), scores_lse=lse)

    channels = kernel_parts.channels_of(x.k), kernel_parts.channels_of(x.values)
    integers = kernel_parts.multiplies_integers(interpret)
    results = run(
        functools.partial(_kernel, capacity=c, channels=channels, requested=requested, integers=integers),
        (inputs,),
        outputs,
        grid=(b, pl.cdiv(h, heads), splits),
        scratch_shapes=[RunningAttention.scratch(blocks, rows, e=e, noisy=x.score_noise is not None, slots=kept_slots)],
        compiler_params=tpu_params(2, 1, VMEM_BYTES * block_factor()),
        interpret=interpret,
        name="decode_attention",
    )
    scores = results.scores
    if results.logits is not None:
        # Rows are too long for VMEM: XLA scores them in an elementwise epilogue.
        finite = jnp.where(jnp.isfinite(results.scores_lse), results.scores_lse, 0.0)
        scores = jnp.exp(results.logits.reshape(b, h, lse_rows, c) - finite[..., None])[:, :, :g]
        scores = scores if requested == "each" else scores.sum(2)
    elif requested == "each":
        scores = scores.reshape(b, h, g, c)
    return Decoded(results.out.reshape(b, h, g, e), results.lse[:, :, :g], scores)


def block_factor() -> int:
    """Return the factor by which blocks may exceed `BLOCK_BYTES` on the target TPU."""
    tpu = chip()
    return 2 if tpu is not None and tpu.vmem_capacity_bytes >= ROOMY else 1


def tile(h: int, c: int, d: int, itemsize: int) -> tuple[int, int]:
    """Return the KV heads and slots of one grid step, for d numbers per head and slot of `itemsize` bytes each."""
    heads, max_bytes = SUBLANES if h % SUBLANES == 0 else h, BLOCK_BYTES * block_factor()
    while h % (2 * heads) == 0 and 2 * heads * c * d * itemsize <= max_bytes:
        heads *= 2  # for short rows: a step must take longer than its start
    slots = max(LANES, max_bytes // (heads * d * itemsize) // LANES * LANES)
    return heads, min(slots, c)


def _kernel(
    x: DecodeAttention,
    outputs: AttentionOutputs,
    scratch: RunningAttention,
    *,
    capacity: int,
    channels: tuple[int, int],
    requested: str | None,
    integers: bool,
) -> None:
    row, split = pl.program_id(0), pl.program_id(2)
    heads, slots = x.position.shape[1:]
    groups = x.q.shape[1] // heads
    head, first = pl.program_id(1) * heads, split * slots
    pl.when(split == 0)(scratch.begin)

    def live(numbers: Array, along: int) -> Array:
        # Memory beyond the last slot is arbitrary, even NaN, which a weight of 0 does not turn into 0.
        if capacity % slots == 0:
            return numbers
        slot = first + jax.lax.broadcasted_iota(jnp.int32, numbers.shape, along)
        return jnp.where(slot < capacity, numbers, jnp.zeros_like(numbers))

    position, query = x.position[0], x.query_position[row]
    visible = kernel_parts.visible_slots(position, query, x.spec.window)
    if capacity % slots:
        visible &= first + jax.lax.broadcasted_iota(jnp.int32, (heads, slots), 1) < capacity
    v, v_scale = kernel_parts.array_and_scale(x.values)
    if v_scale is None:
        v = live(v[0], 3 - channels[1])
    else:
        v, v_scale = v[0], live(v_scale[0], 1)

    q = online_softmax.unpack_rows(x.q[0], heads)
    logits, visible = online_softmax.logits_of(x, q, position, visible, query, channels[0], integers, first, row)
    scratch.softmax.advance(
        logits, scratch.acc, lambda weights: kernel_parts.block_weighted_sum(weights, v, v_scale, channels[1], integers)
    )
    if scratch.noisy is not None:
        logits = online_softmax.add_noise(x.scores, logits, visible, position, row, head)
        scratch.noisy.advance(logits)
    if scratch.logits is not None:
        block = slice(None) if slots == capacity else pl.ds(pl.multiple_of(first, slots), slots)
        scratch.logits[:, :, block] = logits
    elif outputs.logits is not None:
        outputs.logits[0] = logits if len(q) == heads else logits.reshape(heads, slots)

    @pl.when(split == pl.num_programs(2) - 1)
    def _() -> None:
        top, total = (ref[...] for ref in (scratch.noisy or scratch.softmax))  # of slots alone
        out, lse = _finish(x.low_rank, scratch)
        out, lse = online_softmax.pack_rows(out, heads, groups), online_softmax.along_lanes(lse, heads)
        outputs.out[0], outputs.lse[0] = out, lse
        if requested is None:
            return
        if outputs.scores_lse is not None:
            outputs.scores_lse[0] = online_softmax.along_lanes(log_sum(top, total), heads)
            return
        used = slice(groups if len(q) == heads else None)
        share = jnp.exp(scratch.logits[:, used, :capacity] - top[:, used])
        share /= positive(total)[:, used]
        single = requested == "each" and len(q) == heads
        outputs.scores[0] = share if single else online_softmax.sum_groups(share, heads)


def _finish(low_rank: LowRank | None, scratch: RunningAttention) -> tuple[Array, Array]:
    # Merges slots with low-rank attention, which is one more split: its logits are the logarithms of its mass.
    if low_rank is not None:
        heads = low_rank.z.shape[1]
        phi = online_softmax.unpack_rows(low_rank.features[0], heads)
        mass = (phi * kernel_parts.per_query_row(low_rank.z[0], len(phi))).sum(-1, keepdims=True)
        nonempty = mass > 0
        mass = jnp.where(nonempty, mass, 1.0)

        def weigh(weights: Array) -> Array:
            # phi H is divided by its mass, which the weights contain: that cannot overflow.
            memory = kernel_parts.multiply_heads(
                lambda rows: kernel_parts.matmul(rows, low_rank.h[0], (2, 1)), phi, heads
            )
            return weights / mass * memory

        scratch.softmax.advance(jnp.where(nonempty, jnp.log(mass), LOWEST), scratch.acc, weigh)
    top, total = (ref[...] for ref in scratch.softmax)
    return scratch.acc[...] / positive(total), log_sum(top, total)
