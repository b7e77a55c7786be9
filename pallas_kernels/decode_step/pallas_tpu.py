"""A decode step for TPU: every block of keys and values is read once, and only the changed tile is copied back.

The running softmax starts from the new token, and the slot that the token takes is masked: blocks are read unchanged.
The tile of that slot is taken from the block that is in VMEM anyway, and a later block of heads awaits the copy back.
The grid is (cores, blocks of heads of some rows, splits of slots). No copy crosses the first axis, which the cores of a
two-core chip share.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels import operands
from pallas_kernels.attention import AttentionSpec
from pallas_kernels.common import LANES, SUBLANES, over_cores, padded, row_and_block, slots_lie_along_lanes, tpu_params
from pallas_kernels.decode_attention import Gumbel
from pallas_kernels.decode_attention.kernel_parts import (
    LOWEST,
    beside,
    multiplies_integers,
    seen,
    stored,
    weighted,
)
from pallas_kernels.decode_attention.pallas_tpu import VMEM_BYTES, room, tile
from pallas_kernels.decode_attention.running import (
    advance,
    along_lanes,
    log_sum,
    logits_of,
    noisy,
    packed,
    rows_and_blocks,
    rows_of,
    slope_rows,
    summed,
)
from pallas_kernels.decode_attention.types import Decoded, Sinks
from pallas_kernels.decode_step.types import Hashed, Stepped
from pallas_kernels.evict.pallas_tpu import copied, counted
from pallas_kernels.evict.reference import written_through
from pallas_kernels.hamming.hashing import WORD
from pallas_kernels.hamming.reference import distances_of_words
from pallas_kernels.operands import Operand, Quantised
from pallas_kernels.ranking import Protection, victim


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

    kernel = functools.partial(
        _kernel,
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
        kernel,
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

    With a `Hashed` standing they include codes of `bits` bits for each slot, and the planes.
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


def _kernel(
    refs: Any,
    outputs: Any,
    scratch: Any,
    *,
    units: int,
    blocks: int,
    slots: int,
    turned: tuple[str, ...],
    groups: int,
    spec: AttentionSpec,
    shrinks: bool,
    scores: str | Gumbel | None,
    adds: bool,
    words: tuple[str, ...],
    integers: bool,
    sinks: int,
) -> None:
    step, split, splits = pl.program_id(1), pl.program_id(2), pl.num_programs(2)
    row, block = row_and_block(pl.program_id(0), step, units, blocks)
    heads, capacity = refs["position"].shape[1:]
    several = slots < capacity
    newest = refs["new_position"][row]
    writes = newest >= 0
    q = rows_of(refs["q"][0], heads)
    gumbel = scores if isinstance(scores, Gumbel) else None

    scales = [name for name in ("k_scale", "v_scale") if name in refs]

    def of_heads(name: str) -> Array:  # [heads, 1]
        if name in scratch:
            return scratch[name][...]
        numbers = refs[name][...]
        here = jax.lax.broadcasted_iota(jnp.int32, numbers.shape, 1) == jax.lax.rem(row, LANES)
        words = jax.lax.bitcast_convert_type(numbers, jnp.int32)
        return jax.lax.bitcast_convert_type(jnp.where(here, words, 0).sum(-1, keepdims=True), numbers.dtype)

    def when(condition: Any) -> Callable[[Callable[[], None]], None]:
        # A single split is both the first and the last.
        return pl.when(condition) if several else lambda run: run()

    def new(name: str) -> Array:
        if f"{name}_new" in refs:
            return refs[f"{name}_new"][0]
        numbers = scratch.get(f"{name}_entry", refs[f"{name}_entry"].at[0])[...].astype(jnp.float32)
        return numbers * of_heads(f"{name}_scale_entry") if f"{name}_scale" in scales else numbers

    @when(split == 0)
    def _() -> None:
        position = refs["position"][0]
        bounds = [of_heads(name) if refs[name].ndim > 1 else refs[name][0] for name in Protection._fields]
        keep = refs["keep"][0] != 0 if "keep" in refs else None
        standing = refs["standing"][0] if "standing" in refs else None
        codes = [refs[name][0] for name in words]
        if codes:
            queries = refs["hashed_queries"][0].astype(jnp.float32)
            rows = queries[:, None] if groups == 1 else rows_of(queries, heads)
            hashed = [word for group in range(groups) for word in _words(refs["planes"], rows[:, group : group + 1])]
            standing = -distances_of_words(hashed, codes).astype(jnp.float32)
        slot = victim(standing, position, newest, *bounds, keep=keep, shrinks=shrinks)
        for head in range(heads):
            scratch["slots"][head] = slot[head, 0]
        scratch["slot"][...] = slot
        here = jax.lax.broadcasted_iota(jnp.int32, position.shape, 1) == slot
        left = jnp.where(here, position, 0).sum(-1, keepdims=True)
        outputs["left"][0] = jnp.where(writes, left, -1)
        outputs["slot"][0] = jnp.where(writes, slot, capacity)
        outputs["position"][0] = jnp.where(here & writes, newest, position)
        if codes:
            key = _words(refs["planes"], refs["hashed_key"][0].astype(jnp.float32)[:, None])
            for name, code, word in zip(words, codes, key, strict=True):
                outputs[name][0] = jnp.where(here & writes, word, code)
        for name in "kv":
            if f"{name}_entry" in scratch:
                numbers, wide = refs[f"{name}_entry"][0].astype(jnp.float32), scratch[f"{name}_entry"]
                if f"{name}_scale_entry" in scratch:
                    numbers, scratch[f"{name}_scale_entry"][...] = operands.codes_and_scale(numbers, 8)
                wide[...] = numbers.astype(wide.dtype)
        # The running softmax starts from the new token.
        key, value = (new(name) for name in "kv")
        logits = (q.astype(jnp.float32) * jnp.broadcast_to(beside(key, len(q)), q.shape)).sum(-1, keepdims=True)
        logits = jnp.where(writes, spec.capped(logits), LOWEST)
        scratch["top"][...] = jnp.maximum(logits, LOWEST / 2)
        scratch["total"][...] = jnp.where(writes, jnp.ones_like(logits), 0.0)
        value = jnp.broadcast_to(beside(value, len(q)), scratch["acc"].shape)
        scratch["acc"][...] = jnp.where(writes, value, 0.0)
        if gumbel is not None:
            written = jnp.full(logits.shape, writes)
            logits = noisy(refs, logits, written, jnp.full((heads, 1), newest), gumbel, row, block * heads)
            scratch["noisy_top"][...] = jnp.maximum(logits, LOWEST / 2)
            scratch["noisy_total"][...] = scratch["total"][...]
        if scores is not None:
            scratch["new"][...] = logits

    at = pl.ds(pl.multiple_of(split * slots, slots), slots) if several else slice(None)
    index = split * slots + jax.lax.broadcasted_iota(jnp.int32, (heads, slots), 1)
    position = refs["position"][0, :, at]
    visible = seen(position, newest, spec.window) & (index != scratch["slot"][...])
    for name in scales:
        taken = writes & (index == scratch["slot"][...])
        outputs[name][0] = jnp.where(taken, of_heads(f"{name}_entry"), refs[name][0])
    v_scale = refs["v_scale"][0] if "v_scale" in refs else None
    k_channels, v_channels = (1 if name in turned else 2 for name in "kv")
    first = split * slots
    logits, visible = logits_of(refs, q, position, visible, newest, spec, k_channels, integers, sinks, first, row)

    def wait() -> None:
        # Semaphores count bytes, so one wait covers the tiles of all heads.
        for i, name in enumerate("kv"):
            sent = scratch[f"{name}_tile"]
            pltpu.make_async_copy(sent, sent, scratch["sent"].at[i]).wait()

    @pl.when((step > 0) & (split == 0))
    def _() -> None:
        wait()

    advance(scratch, logits, lambda weights: weighted(weights, refs["v"][0], v_scale, v_channels, integers))
    if gumbel is not None:
        logits = noisy(refs, logits, visible, position, gumbel, row, block * heads)
        advance(scratch, logits, of="noisy_")
    if scores is not None:
        scratch["logits"][:, :, at] = logits

    for head in range(heads):
        slot = scratch["slots"][head]

        @when((slot >= split * slots) & (slot < (split + 1) * slots))
        def _(head: int = head, slot: Any = slot) -> None:
            for i, name in enumerate("kv"):
                row_of_head = head if name in turned else pl.ds(head, 1)
                own, entry = (0, row_of_head), scratch.get(f"{name}_entry")
                _send(
                    refs[name].at[0, head],
                    outputs[name].at[row, block * heads + head],
                    refs[f"{name}_entry"].at[own] if entry is None else entry.at[row_of_head],
                    outputs[f"{name}_taken"].at[own] if f"{name}_taken" in outputs else None,
                    scratch[f"{name}_tile"].at[head],
                    scratch["sent"].at[i],
                    slot,
                    split * slots,
                    writes,
                    int(name in turned),
                )

    @when(split == splits - 1)
    def _() -> None:
        total = scratch["total"][...]
        some = total > 0
        out = scratch["acc"][...] / jnp.where(some, total, 1.0)
        lse = log_sum(scratch["top"][...], total)
        outputs["out"][0] = packed(out, heads, groups).astype(outputs["out"].dtype)
        outputs["lse"][0] = along_lanes(lse, heads)
        if scores is None:
            return
        if gumbel is not None:
            total = scratch["noisy_total"][...]
        used = slice(groups if len(q) == heads else None)
        top = scratch["noisy_top" if gumbel is not None else "top"][:, used]
        share = 1 / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[:, used]
        found = jnp.exp(scratch["logits"][:, used] - top) * share
        new = jnp.exp(scratch["new"][:, used] - top) * share
        here = jax.lax.broadcasted_iota(jnp.int32, (heads, capacity), 1) == scratch["slot"][...]
        if scores == "each" and len(q) == heads:
            outputs["scores"][0] = jnp.where(here[:, None, :], new, found)
        else:
            found = summed(found, heads) + (refs["standing"][0] if adds else 0.0)
            outputs["scores"][0] = jnp.where(here & writes, summed(new, heads), found)

    # The next core's blocks do not await these copies.
    @pl.when((step == units - 1) & (split == splits - 1))
    def _() -> None:
        wait()


def _words(planes: Any, x: Float[Array, "h 1 d"]) -> list[UInt32[Array, "h 1"]]:
    """Return the words of a vector's code (`hamming.hashes`) in each head, given the planes [h bits d]."""
    projected = (planes[...] * x).sum(-1, keepdims=True)
    found = []
    for first in range(0, projected.shape[1], WORD):
        part = projected[:, first : first + WORD]
        bit = jnp.left_shift(1, jax.lax.broadcasted_iota(jnp.int32, part.shape, 1))
        found.append(jax.lax.bitcast_convert_type(jnp.where(part >= 0, bit, 0).sum(1), jnp.uint32))
    return found


def _send(
    block: Any,
    cache: Any,
    entry: Any,
    taken: Any,
    tile: Any,
    semaphore: Any,
    slot: Any,
    first: Any,
    writes: Any,
    axis: int,
) -> None:
    """Start to copy back the tile around a slot, with the new token's entry, from a block whose first slot is `first`.

    A row of padding writes nothing: its tiles go back unchanged. If `taken` is given, it gets the slot's old contents.
    """
    size = tile.shape[axis]
    start = pl.multiple_of(slot & -size, size)

    def slots(start: Any) -> tuple[Any, ...]:
        return (slice(None),) * axis + (pl.ds(pl.multiple_of(start, size), size),)

    old = block[slots(start - first)].astype(counted(tile.dtype))
    chosen = jax.lax.broadcasted_iota(jnp.int32, old.shape, axis) == slot - start
    if taken is not None:
        taken[...] = jnp.where(chosen, old, jnp.zeros_like(old)).sum(axis, keepdims=True)
    tile[...] = jnp.where(chosen & writes, entry[...], old).astype(tile.dtype)
    pltpu.make_async_copy(tile, cache.at[slots(start)], semaphore).start()
