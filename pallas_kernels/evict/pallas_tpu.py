"""Eviction for TPU, in place: pairs by an aligned read-modify-write, buffers with slots along lanes as whole blocks.

A blocked output that aliases its input is not filled before the kernel runs, so a partial write would leave garbage.
Whole blocks and explicit copies avoid that.

No step of the grid awaits a copy that it has started itself. Each step starts to read the tiles of its own block of
heads, starts to write those of the block before, and awaits the writes of the block before that. The grid is (cores,
blocks of heads of some rows, plus two steps). No copy crosses the first axis, which the cores of a two-core chip share.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.common import SUBLANES, over_cores, row_and_block, slots_lie_along_lanes, tpu_params
from pallas_kernels.evict.types import EvictInputs
from pallas_kernels.ranking import Protection, victim

UNIT = 16
"""Minimum slots of an aligned copy: one tile of 16 bits, two tiles of 32 bits."""
VMEM_BYTES = 14 << 20


def evict(x: EvictInputs, *, interpret: Any) -> tuple[Array, Array, Any, Array, Any]:
    """See `api.evict`."""
    position, (b, h, c) = x.position, x.position.shape
    heads = SUBLANES if h % SUBLANES == 0 else h
    leaves, tree = jax.tree.flatten(x.buffers)
    values = [value.astype(leaf.dtype) for leaf, value in zip(leaves, jax.tree.leaves(x.added), strict=True)]
    planes = [i for i, leaf in enumerate(leaves) if leaf.ndim == 4 and in_planes(leaf)]
    wide = [i for i, leaf in enumerate(leaves) if leaf.ndim == 4 and i not in planes]
    narrow = [i for i, leaf in enumerate(leaves) if leaf.ndim == 3]

    blocks = h // heads
    cores, units = over_cores(b * blocks)

    def block(*tail: int, late: int = 0) -> pl.BlockSpec:
        """Return the spec of a block of heads, used in its own step or `late` steps later."""

        def index(core: Array, step: Array) -> tuple[Any, ...]:
            step = jnp.clip(step - late, 0, units - 1)
            return row_and_block(core, step, units, blocks) + (0,) * len(tail)

        return pl.BlockSpec((1, heads, *tail), index)

    inputs = {
        "new_position": (x.new_position, pl.BlockSpec(memory_space=pltpu.SMEM)),
        **{name: (bound[..., None], block(1)) for name, bound in x.protection.of_heads()._asdict().items()},
        "position": (position, block(c)),
        "narrow": ([_word(leaves[i]) for i in narrow], [block(c)] * len(narrow)),
        "narrow_new": ([_word(values[i])[..., None] for i in narrow], [block(1)] * len(narrow)),
        # In the stored order, so XLA makes no copy.
        "planes": ([leaves[i].swapaxes(2, 3) for i in planes], [block(leaves[i].shape[-1], c) for i in planes]),
        "planes_new": ([values[i][..., None] for i in planes], [block(leaves[i].shape[-1], 1) for i in planes]),
        "wide": ([leaves[i] for i in wide], [pl.BlockSpec(memory_space=pl.ANY)] * len(wide)),
        "wide_new": ([_whole(values[i]) for i in wide], [block(leaves[i].shape[-1], late=1) for i in wide]),
    }
    if x.scores is not None:
        inputs["scores"] = (x.scores.astype(jnp.float32), block(c))
    if x.keep is not None:
        inputs["keep"] = (x.keep.astype(jnp.int32), block(c))
    arrays = {name: array for name, (array, _) in inputs.items()}
    specs = {name: spec for name, (_, spec) in inputs.items()}
    out_specs = {
        "slot": block(1),
        "taken": specs["wide_new"],
        "taken_narrow": [block(1)] * (len(narrow) + 1),
        "taken_planes": specs["planes_new"],
        **{name: specs[name] for name in ("position", "narrow", "planes", "wide")},
    }

    def shaped(x: Array, *tail: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((b, h, *tail), x.dtype)

    out_shape = {
        "slot": shaped(position, 1),
        "taken": [shaped(x, x.shape[-1]) for x in arrays["wide_new"]],
        "taken_planes": [shaped(x, *x.shape[2:]) for x in arrays["planes_new"]],
        "taken_narrow": [shaped(x, 1) for x in (position, *arrays["narrow"])],
        "position": shaped(position, c),
        "narrow": [shaped(x, c) for x in arrays["narrow"]],
        "planes": [shaped(x, *x.shape[2:]) for x in arrays["planes"]],
        "wide": [shaped(x, *x.shape[2:]) for x in arrays["wide"]],
    }
    found = pl.pallas_call(
        functools.partial(_kernel, units=units, blocks=blocks, shrinks=x.shrinks),
        grid=(cores, units + 2 * bool(wide)),
        in_specs=[specs],
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[
            [_tiles(leaves[i], heads) for i in wide],
            pltpu.SMEM((2, heads), jnp.int32),
            pltpu.SemaphoreType.DMA((2, max(1, len(wide)), 2)),
        ],
        input_output_aliases=_aliases(arrays, out_shape),
        compiler_params=tpu_params(1, 1, VMEM_BYTES),
        interpret=interpret,
        name="evict",
    )(arrays)
    old, new = {}, {}
    for i, gone, leaf in zip(wide, found["taken"], found["wide"], strict=True):
        old[i], new[i] = gone.astype(leaves[i].dtype), leaf
    for i, gone, leaf in zip(planes, found["taken_planes"], found["planes"], strict=True):
        old[i], new[i] = gone[..., 0], leaf.swapaxes(2, 3)
    for i, gone, leaf in zip(narrow, found["taken_narrow"][1:], found["narrow"], strict=True):
        old[i], new[i] = gone[..., 0].astype(leaves[i].dtype), leaf.astype(leaves[i].dtype)
    taken, written = (jax.tree.unflatten(tree, [some[i] for i in range(len(leaves))]) for some in (old, new))
    slot, left = found["slot"][..., 0], found["taken_narrow"][0][..., 0]
    return slot, left, taken if x.pairs else None, found["position"], written


def in_planes(leaf: Array) -> bool:
    """Return whether a TPU stores a buffer [b h c w] as w rows of slots."""
    return slots_lie_along_lanes(*leaf.shape[2:])


def copied(leaf: Array) -> int:
    """Return the slots of one aligned copy of a buffer [b h c w].

    They are one tile of 16 bits, two tiles of 32 bits, and a tile of 8 bits, or half of one if c requires it.
    """
    return max(UNIT, math.gcd(leaf.shape[2], 2 * UNIT)) if leaf.dtype.itemsize == 1 else UNIT


def counted(dtype: DTypeLike) -> Any:
    """Return the 32-bit dtype in which kernels select and sum numbers of a dtype."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32


def _tiles(leaf: Array, heads: int) -> Any:
    # For two blocks of heads: one is read while the other is written.
    return pltpu.VMEM((2, heads, copied(leaf), leaf.shape[-1]), leaf.dtype)


def _word(x: Array) -> Array:
    return x.astype(jnp.int32) if x.dtype == jnp.bool_ else x


def _whole(x: Array) -> Array:
    # A block of eight heads does not fill a tile of 8-bit numbers.
    return x.astype(jnp.int32) if x.dtype.itemsize == 1 else x


def _aliases(arrays: Any, out_shape: Any) -> dict[int, int]:
    # Inputs and outputs of the same path share a buffer.
    def places(tree: Any) -> dict[str, int]:
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
        return {path: i for i, path in enumerate(paths)}

    ins, outs = places(arrays), places(out_shape)
    return {ins[path]: outs[path] for path in outs if path in ins}


def _kernel(
    refs: Any, outputs: Any, tiles: Any, slots: Any, semaphores: Any, *, units: int, blocks: int, shrinks: bool
) -> None:
    core, step = pl.program_id(0), pl.program_id(1)
    heads = refs["position"].shape[1]
    own = jax.lax.rem(step, 2)

    def place(step: Any) -> tuple[Any, Any]:
        row, block = row_and_block(core, step, units, blocks)
        return row, block * heads

    def start(step: Any, which: Any, *, into_cache: bool) -> None:
        row, first = place(step)
        for leaf, tile in enumerate(tiles):
            rows = tile.shape[2]
            for head in range(heads):
                begin = pl.multiple_of(slots[which, head] & -rows, rows)
                cache = outputs["wide"][leaf].at[row, first + head, pl.ds(begin, rows)]
                ends = (tile.at[which, head], cache) if into_cache else (cache, tile.at[which, head])
                pltpu.make_async_copy(*ends, semaphores.at[int(into_cache), leaf, which]).start()

    def wait(which: Any, *, into_cache: bool) -> None:
        # Semaphores count bytes, so one wait covers the tiles of all heads.
        for leaf, tile in enumerate(tiles):
            whole = tile.at[which]
            pltpu.make_async_copy(whole, whole, semaphores.at[int(into_cache), leaf, which]).wait()

    @pl.when(step >= 2)
    def _() -> None:
        wait(own, into_cache=True)

    @pl.when(step < units)
    def _() -> None:
        newest = refs["new_position"][place(step)[0]]
        _choose(refs, outputs, slots.at[own], newest, shrinks)
        start(step, own, into_cache=False)

    @pl.when((step >= 1) & (step <= units))
    def _() -> None:
        before = 1 - own
        wait(before, into_cache=False)
        writes = refs["new_position"][place(step - 1)[0]] >= 0
        for leaf, tile in enumerate(tiles):
            _exchange(tile.at[before], slots.at[before], refs["wide_new"][leaf], outputs["taken"][leaf], writes)
        start(step - 1, before, into_cache=True)


def _choose(refs: Any, outputs: Any, slots: Any, newest: Any, shrinks: bool) -> None:
    """Select the slots of a block of heads, and exchange entries of the buffers that are whole blocks."""
    heads, capacity = refs["position"].shape[1:]
    position = refs["position"][0]
    bounds = [refs[name][0] for name in Protection._fields]
    keep = refs["keep"][0] != 0 if "keep" in refs else None
    scores = refs["scores"][0] if "scores" in refs else None
    slot = victim(scores, position, newest, *bounds, keep=keep, shrinks=shrinks)
    for head in range(heads):
        slots[head] = jnp.where(jax.lax.broadcasted_iota(jnp.int32, slot.shape, 0) == head, slot, 0).sum()
    here = jax.lax.broadcasted_iota(jnp.int32, (heads, capacity), 1) == slot
    writes = newest >= 0
    left = jnp.where(here, position, 0).sum(-1, keepdims=True)
    outputs["taken_narrow"][0][0] = jnp.where(writes, left, -1)
    outputs["position"][0] = jnp.where(here & writes, newest, position)
    for i, (leaf, new) in enumerate(zip(refs["narrow"], refs["narrow_new"], strict=True)):
        values = leaf[0]
        outputs["taken_narrow"][i + 1][0] = _chosen(values, here)
        outputs["narrow"][i][0] = jnp.where(here & writes, new[0], values)
    for i, (leaf, new) in enumerate(zip(refs["planes"], refs["planes_new"], strict=True)):
        for head in range(heads):
            values = leaf[0, head]
            chosen = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1) == slots[head]
            outputs["taken_planes"][i][0, head] = _chosen(values, chosen)
            outputs["planes"][i][0, head] = jnp.where(chosen & writes, new[0, head], values)
    outputs["slot"][0] = jnp.where(writes, slot, capacity)


def _exchange(tile: Any, slots: Any, new: Any, taken: Any, writes: Any) -> None:
    """Exchange entries in tiles that have arrived; tiles of a row of padding go back unchanged."""
    for head in range(tile.shape[0]):
        old = tile[head].astype(counted(tile.dtype))
        chosen = jax.lax.broadcasted_iota(jnp.int32, old.shape, 0) == slots[head] & (tile.shape[1] - 1)
        here_only = jnp.where(chosen, old, jnp.zeros_like(old)).sum(0, keepdims=True)
        taken[0, pl.ds(head, 1)] = here_only.astype(taken.dtype)
        value = new[0, pl.ds(head, 1)].astype(old.dtype)
        tile[head] = jnp.where(chosen & writes, value, old).astype(tile.dtype)


def _chosen(values: Array, chosen: Array) -> Array:
    """Return the one number of each row that is chosen."""
    # TPUs cannot sum unsigned integers.
    unsigned = values.dtype == jnp.uint32
    signed = jax.lax.bitcast_convert_type(values, jnp.int32) if unsigned else values
    total = jnp.where(chosen, signed, jnp.zeros_like(signed)).sum(-1, keepdims=True)
    return jax.lax.bitcast_convert_type(total, jnp.uint32) if unsigned else total
