"""A decode step for TPU: every block of keys and values is read once, and only the changed tile is copied back.

The running softmax starts from the new token, and the slot that the token takes is masked: blocks are read unchanged.
The tile of that slot is taken from the block that is in VMEM anyway, and a later block of heads awaits the copy back.
The grid is (cores, blocks of heads of some rows, splits of slots). No copy crosses the first axis, which the cores of a
two-core chip share.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import operands
from pallas_kernels.attention import AttentionSpec
from pallas_kernels.common import LANES, SUBLANES, over_cores, padded, row_and_block, slots_lie_along_lanes, tpu_params
from pallas_kernels.decode_attention import Gumbel
from pallas_kernels.decode_attention.kernel_parts import multiplies_integers, stored
from pallas_kernels.decode_attention.pallas_tpu import VMEM_BYTES, room, tile
from pallas_kernels.decode_attention.running import rows_and_blocks, slope_rows
from pallas_kernels.decode_attention.types import Decoded, Sinks
from pallas_kernels.decode_step.kernel import kernel
from pallas_kernels.decode_step.types import Hashed, Stepped
from pallas_kernels.evict.pallas_tpu import copied, counted
from pallas_kernels.evict.reference import written_through
from pallas_kernels.hamming.hashing import WORD
from pallas_kernels.operands import Operand, Quantised
from pallas_kernels.ranking import Protection


def decode_step(
    standing: Float[Array, "b h c"] | Hashed | None,
    position: Int[Array, "b h c"],
    new_position: Int[Array, " b"],
    k: Operand,
    v: Operand,
    buffers: Any,
    added: tuple[Float[Array, "b h d"], Float[Array, "b h e"], Any],
    q: Float[Array, "b h g d"],
    spec: AttentionSpec,
    *,
    protection: Protection,
    keep: Bool[Array, "b h c"] | None,
    shrinks: bool,
    pairs: bool,
    sinks: Sinks | None,
    scores: str | Gumbel | None,
    adds: bool,
    rounds: bool,
    interpret: Any,
) -> Stepped:
    """See `api.decode_step`."""
    b, h, g, d = q.shape
    c, e = v.shape[2:]
    heads, slots = blocks_of(k, v)
    splits, blocks, (sets, rows) = c // slots, h // heads, rows_and_blocks(heads, g)
    cores, units = over_cores(b * blocks)

    def block(*tail: int, along: int | None = None) -> pl.BlockSpec:
        """Return the spec of a block of heads: all of it, or its split along one axis of the tail."""

        def index(core: Array, step: Array, split: Array) -> tuple[Any, ...]:
            return *row_and_block(core, step, units, blocks), *(
                split if axis == along else 0 for axis in range(len(tail))
            )

        return pl.BlockSpec((1, heads, *tail), index)

    def packed(width: int) -> pl.BlockSpec:
        whole = block(width)
        return pl.BlockSpec((1, heads * g, width), whole.index_map)

    def of_rows(core: Array, step: Array, split: Array) -> tuple[Any, Any]:
        row, which = row_and_block(core, step, units, blocks)
        return which, row // LANES

    def of_block(core: Array, step: Array, split: Array) -> tuple[Any, ...]:
        return row_and_block(core, step, units, blocks)[1], 0, 0

    def told(numbers: Mapping[str, Array]) -> dict[str, tuple[Array, pl.BlockSpec]]:
        # One number of each head, [b h]: rows are along the lanes, as XLA stores few heads of many rows.
        one = pl.BlockSpec((heads, min(b, LANES)), of_rows)
        return {name: (x.T, one) for name, x in numbers.items()}

    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    inputs: dict[str, tuple[Array, pl.BlockSpec]] = {
        "new_position": (new_position, scalars),
        "position": (position, block(c)),
        "q": (q.reshape(b, h * g, d), packed(d)),
    }
    words = []  # names of the codes, if codes rank the slots
    if isinstance(standing, Hashed):
        planes, queries, keys = standing.hashing
        bits, width = planes.shape[1:]
        of_heads = pl.BlockSpec((heads, bits, width), of_block)
        inputs["planes"] = planes.astype(jnp.float32), of_heads
        inputs["hashed_queries"] = queries.reshape(b, h * g, width), packed(width)
        inputs["hashed_key"] = in_registers(keys[:, :, 0], heads), block(width)
        words = [f"code{i}" for i in range(len(standing.codes))]
        inputs |= {name: (code, block(c)) for name, code in zip(words, standing.codes, strict=True)}
    elif standing is not None:
        inputs["standing"] = (standing.astype(jnp.float32), block(c))
    if sinks is not None:
        inputs["sinks_q"] = (sinks.q.reshape(b, h * g, d), packed(d))
        if sinks.gap is not None:
            inputs["sinks_gap"] = (sinks.gap, scalars)
    bounds = {name: x.astype(jnp.int32) for name, x in protection._asdict().items()}
    inputs |= told({name: x for name, x in bounds.items() if x.ndim})
    inputs |= {name: (x[None], scalars) for name, x in bounds.items() if not x.ndim}
    if keep is not None:
        inputs["keep"] = (keep.astype(jnp.int32), block(c))
    turned: list[str] = []  # names of operands whose blocks are [channels, slots]
    scales: list[str] = []  # names of the scales of codes
    for name, operand, new in (("k", k, added[0]), ("v", v, added[1])):
        array = stored(operand)[0]
        width = array.shape[-1]
        turns = slots_lie_along_lanes(c, width)
        entry = coded = new
        if isinstance(operand, Quantised):
            inputs[f"{name}_scale"] = (operand.scale, block(slots, along=0))
            scales.append(f"{name}_scale")
            if turns or operand.bits < 8:  # otherwise the kernel computes the codes
                coded = operands.quantise(new, operand.bits)
                entry = coded.codes
                inputs |= told({f"{name}_scale_entry": coded.scale})
        entry = entry.astype(counted(entry.dtype)) if turns else in_registers(entry, heads)
        if turns:
            turned.append(name)
            inputs[name] = (jnp.swapaxes(array, 2, 3), block(width, slots, along=1))
            inputs[f"{name}_entry"] = (entry[..., None], block(width, 1))
        else:
            inputs[name] = (array, block(slots, width, along=0))
            inputs[f"{name}_entry"] = (entry, block(width))
        if name in turned or width < operand.shape[-1]:  # attention needs its numbers in another layout
            inputs[f"{name}_new"] = (operands.values(coded, jnp.float32), block(operand.shape[-1]))
    if spec.slopes is not None:
        inputs["slopes"] = (slope_rows(spec.slopes), pl.BlockSpec((sets, rows, 1), of_block))
    if isinstance(scores, Gumbel):
        inputs["seed"] = (jax.lax.bitcast_convert_type(scores.seed, jnp.int32), scalars)
        inputs["tau"] = (scores.tau.astype(jnp.float32), scalars)
        if scores.first is not None:
            inputs["first"] = (scores.first, scalars)

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    single, lanes = jnp.float32, 1 if sets < heads else rows
    outputs: dict[str, tuple[Any, Any, pl.BlockSpec]] = {
        "out": ((b, h * g, e), q.dtype if rounds else single, packed(e)),
        "lse": ((b, h, lanes), single, block(lanes)),
        "slot": ((b, h, 1), jnp.int32, block(1)),
        "left": ((b, h, 1), jnp.int32, block(1)),
        **{name: (position.shape, inputs[name][0].dtype, block(c)) for name in ("position", *words)},
        **{name: (inputs[name][0].shape, single, inputs[name][1]) for name in scales},
        **{name: (inputs[name][0].shape, inputs[name][0].dtype, anywhere) for name in "kv"},
    }
    if pairs:
        for name in "kv":
            entries, whole_row = inputs[f"{name}_entry"]
            outputs[f"{name}_taken"] = (entries.shape, counted(inputs[name][0].dtype), whole_row)
    scratch: dict[str, Any] = {"acc": (sets, rows, e), "top": (sets, rows, 1), "total": (sets, rows, 1)}
    if isinstance(scores, Gumbel):
        scratch |= {"noisy_top": (sets, rows, 1), "noisy_total": (sets, rows, 1)}
    if scores is not None:
        shape = (g, c) if scores == "each" and sets == heads else (c,)
        outputs["scores"] = ((b, h, *shape), single, block(*shape))
        scratch |= {"logits": (sets, rows, c), "new": (sets, rows, 1)}
    scratch = {name: pltpu.VMEM(shape, single) for name, shape in scratch.items()}
    scratch["slot"] = pltpu.VMEM((heads, 1), jnp.int32)
    scratch["slots"] = pltpu.SMEM((heads,), jnp.int32)
    for name in "kv":
        array = stored({"k": k, "v": v}[name])[0]
        width = array.shape[-1]
        shape = (width, LANES) if name in turned else (copied(array), width)
        scratch[f"{name}_tile"] = pltpu.VMEM((heads, *shape), array.dtype)
        if inputs[f"{name}_entry"][0].dtype != counted(array.dtype):  # single rows can only be read in 32 bits
            scratch[f"{name}_entry"] = pltpu.VMEM((heads, width), counted(array.dtype))
        if f"{name}_scale" in scales and f"{name}_scale_entry" not in inputs:
            scratch[f"{name}_scale_entry"] = pltpu.VMEM((heads, 1), single)
    scratch["sent"] = pltpu.SemaphoreType.DMA((2,))

    body = functools.partial(
        kernel,
        units=units,
        blocks=blocks,
        slots=slots,
        turned=tuple(turned),
        groups=g,
        spec=dataclasses.replace(spec, slopes=None),
        shrinks=shrinks,
        scores=scores.static if isinstance(scores, Gumbel) else scores,
        adds=adds,
        words=tuple(words),
        integers=multiplies_integers(interpret),
        sinks=0 if sinks is None else sinks.count,
    )
    # The indices of inputs and outputs among the leaves of their dictionaries.
    came, went = (sorted(names) for names in (inputs, outputs))
    shared = {name: name for name in ("position", "k", "v", *words, *scales)} | ({"standing": "scores"} if adds else {})
    found = pl.pallas_call(
        body,
        grid=(cores, units, splits),
        in_specs=[{name: spec for name, (_, spec) in inputs.items()}],
        out_specs={name: spec for name, (_, _, spec) in outputs.items()},
        out_shape={name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype, _) in outputs.items()},
        scratch_shapes=[scratch],
        input_output_aliases={came.index(given): went.index(result) for given, result in shared.items()},
        compiler_params=tpu_params(1, 2, VMEM_BYTES * room()),
        interpret=interpret,
        # XLA prefetches weights during operations with a high cost estimate.
        cost_estimate=pl.CostEstimate(
            flops=4 * b * h * g * c * d,
            transcendentals=b * h * g * c,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x, _ in inputs.values()),
        ),
        name="decode_step",
    )({name: array for name, (array, _) in inputs.items()})

    slot = found["slot"][..., 0]

    def written(leaf: Array, value: Array) -> Array:
        # Slot by slot, so that XLA fuses it with the score's next update of its buffers.
        return written_through(leaf, slot, value)

    def whole(name: str) -> Operand:
        array = found[name].swapaxes(2, 3) if name in turned else found[name]
        return Quantised(array, found[f"{name}_scale"]) if f"{name}_scale" in found else array

    def taken(name: str, old: Operand) -> Operand:
        array = found[f"{name}_taken"].reshape(b, h, -1)
        if not isinstance(old, Quantised):
            return array
        array = array.astype(found[name].dtype)
        here = jnp.arange(c) == slot[..., None]
        return Quantised(array, jnp.where(here, old.scale, 0.0).sum(-1))

    result = found["scores"].reshape(b, h, g, c) if scores == "each" else found.get("scores")
    attended = Decoded(found["out"].reshape(b, h, g, e), found["lse"][:, :, :g], result)
    pair = whole("k"), whole("v")
    others = jax.tree.map(written, buffers, added[2])
    leaving = (taken("k", k), taken("v", v)) if pairs else None
    codes = tuple(found[name] for name in words) or None
    return Stepped(attended, slot, found["left"][..., 0], found["position"], *pair, others, leaving, codes)


def unit(array: Array) -> int:
    """Return the slots of one copy back: a tile of keys or values [b h c w], or two."""
    return LANES if slots_lie_along_lanes(*array.shape[2:]) else copied(array)


def in_registers(entry: Array, heads: int) -> Array:
    """Return new keys or values [b h w] for the kernel's blocks of `heads` heads.

    Narrow dtypes must fill whole registers. XLA would have to change the layout of fewer heads, so those are converted
    to 32 bits.
    """
    fills = entry.dtype == jnp.bfloat16 and heads % SUBLANES == 0
    return entry if fills else entry.astype(counted(entry.dtype))


def blocks_of(k: Operand, v: Operand) -> tuple[int, int]:
    """Return the KV heads and slots of one grid step.

    The slots of a step divide the cache's, since inputs that alias the cache must not be read beyond its end.
    """
    (_, h, c, d), e = k.shape, v.shape[3]
    heads, most = tile(h, c, max(d, e), min(stored(x)[0].dtype.itemsize for x in (k, v)))
    return heads, next((slots for slots in range(most // LANES * LANES, most // 4, -LANES) if c % slots == 0), c)


def block_bytes(q: Array, k: Operand, v: Operand, scores: str | Gumbel | None, bits: int = 0) -> int:
    """Estimate a step's bytes of VMEM: double-buffered blocks, and scratch memory.

    If slots rank by hash codes, `bits` is their length, and the estimate includes codes and hyperplanes.
    """
    g, c = q.shape[2], v.shape[2]
    arrays = [stored(x)[0] for x in (k, v)]
    heads, slots = blocks_of(k, v)
    (sets, rows), whole = rows_and_blocks(heads, g), padded(c, LANES)
    rows = sets * rows // heads
    pairs = sum(padded(x.shape[-1], LANES) * x.dtype.itemsize for x in arrays) * padded(slots, LANES)
    # Positions before and after, standing, protected slots, two scales; words before and after.
    of_slots = (6 + 2 * -(-bits // WORD)) * 4 * whole
    held = 0 if scores is None else 4 * whole * (rows + 2 * (rows if scores == "each" else 1))
    planes = 4 * padded(bits, SUBLANES) * padded(q.shape[3], LANES)
    small = 4 * LANES * (16 * rows + 4 * LANES)
    return heads * (2 * (pairs + of_slots + planes) + held + small)
