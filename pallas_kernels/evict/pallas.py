"""Eviction for TPU, in place: pairs by an aligned read-modify-write, what lies along the lanes as whole blocks.

A blocked output that aliases its input is not filled before the kernel runs, so a partial write would leave garbage;
whole blocks and explicit copies cannot.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.common import SUBLANES, slots_lie_along_lanes
from pallas_kernels.ranking import Protection, victim

ROWS = {4: 16, 2: 16, 1: 32}
"""Slots of one aligned copy by the bytes of a number: a tile, two of float32."""
VMEM_BYTES = 14 << 20


def evict(
    scores: Float[Array, "b h c"],
    position: Int[Array, "b h c"],
    new_position: Int[Array, " b"],
    buffers: Any,
    added: Any,
    *,
    protection: Protection,
    keep: Bool[Array, "b h c"] | None,
    shrinks: bool,
    interpret: Any,
) -> tuple[Array, Array, Any, Array, Any]:
    """See `api.evict`."""
    b, h, c = position.shape
    heads = SUBLANES if h % SUBLANES == 0 else h
    leaves, tree = jax.tree.flatten(buffers)
    values = [value.astype(leaf.dtype) for leaf, value in zip(leaves, jax.tree.leaves(added), strict=True)]
    planes = [i for i, leaf in enumerate(leaves) if leaf.ndim == 4 and in_planes(leaf)]
    wide = [i for i, leaf in enumerate(leaves) if leaf.ndim == 4 and i not in planes]
    narrow = [i for i, leaf in enumerate(leaves) if leaf.ndim == 3]

    def block(*tail: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, heads, *tail), lambda b, h: (b, h) + (0,) * len(tail))

    inputs = {
        "new_position": (new_position, pl.BlockSpec(memory_space=pltpu.SMEM)),
        "scores": (scores.astype(jnp.float32), block(c)),
        **{name: (x.astype(jnp.int32)[..., None], block(1)) for name, x in protection._asdict().items()},
        "position": (position, block(c)),
        "narrow": ([_word(leaves[i]) for i in narrow], [block(c)] * len(narrow)),
        "narrow_new": ([_word(values[i])[..., None] for i in narrow], [block(1)] * len(narrow)),
        # As they lie in memory: no copy.
        "planes": ([leaves[i].swapaxes(2, 3) for i in planes], [block(leaves[i].shape[-1], c) for i in planes]),
        "planes_new": ([values[i][..., None] for i in planes], [block(leaves[i].shape[-1], 1) for i in planes]),
        "wide": ([leaves[i] for i in wide], [pl.BlockSpec(memory_space=pl.ANY)] * len(wide)),
        "wide_new": ([_whole(values[i]) for i in wide], [block(leaves[i].shape[-1]) for i in wide]),
    }
    if keep is not None:
        inputs["keep"] = (keep.astype(jnp.int32), block(c))
    arrays = {name: array for name, (array, _) in inputs.items()}
    specs = {name: spec for name, (_, spec) in inputs.items()}
    out_specs = {
        "slot": block(1),
        "taken": [block(leaves[i].shape[-1]) for i in wide],
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
        functools.partial(_kernel, shrinks=shrinks),
        grid=(b, pl.cdiv(h, heads)),
        in_specs=[specs],
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[
            [pltpu.VMEM((heads, ROWS[leaves[i].dtype.itemsize], leaves[i].shape[-1]), leaves[i].dtype) for i in wide],
            pltpu.SemaphoreType.DMA((max(1, len(wide)), heads)),
        ],
        input_output_aliases=_aliases(arrays, out_shape),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="evict",
    )(arrays)
    old, new = {}, {}
    for i, x, y in zip(wide, found["taken"], found["wide"], strict=True):
        old[i], new[i] = x.astype(leaves[i].dtype), y
    for i, x, y in zip(planes, found["taken_planes"], found["planes"], strict=True):
        old[i], new[i] = x[..., 0], y.swapaxes(2, 3)
    for i, x, y in zip(narrow, found["taken_narrow"][1:], found["narrow"], strict=True):
        old[i], new[i] = x[..., 0].astype(leaves[i].dtype), y.astype(leaves[i].dtype)
    taken, written = (jax.tree.unflatten(tree, [x[i] for i in range(len(leaves))]) for x in (old, new))
    return found["slot"][..., 0], found["taken_narrow"][0][..., 0], taken, found["position"], written


def in_planes(leaf: Array) -> bool:
    """Whether a buffer [b h c w] lies on a TPU as w rows of slots."""
    return slots_lie_along_lanes(*leaf.shape[2:])


def _word(x: Array) -> Array:
    return x.astype(jnp.int32) if x.dtype == jnp.bool_ else x


def _whole(x: Array) -> Array:
    # A block of eight heads is no tile of 8-bit numbers.
    return x.astype(jnp.int32) if x.dtype.itemsize == 1 else x


def _aliases(arrays: Any, out_shape: Any) -> dict[int, int]:
    # Leaves of the same name and place share a buffer.
    def places(tree: Any) -> dict[str, int]:
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
        return {path: i for i, path in enumerate(paths)}

    ins, outs = places(arrays), places(out_shape)
    return {ins[path]: outs[path] for path in outs if path in ins}


def _kernel(refs: Any, outputs: Any, tiles: Any, semaphores: Any, *, shrinks: bool) -> None:
    row, first = pl.program_id(0), pl.program_id(1) * refs["position"].shape[1]
    heads, capacity = refs["position"].shape[1:]
    position, newest = refs["position"][0], refs["new_position"][row]
    bounds = [refs[name][0] for name in Protection._fields]
    keep = refs["keep"][0] != 0 if "keep" in refs else None
    slot = victim(refs["scores"][0], position, newest, *bounds, keep=keep, shrinks=shrinks)
    slots = [jnp.where(jax.lax.broadcasted_iota(jnp.int32, slot.shape, 0) == i, slot, 0).sum() for i in range(heads)]

    def start(tile: Any, head: int) -> Any:
        rows = tile.shape[1]
        return pl.multiple_of(slots[head] & -rows, rows)

    def copies(into_cache: bool) -> list[Any]:
        made = []
        for leaf, tile in enumerate(tiles):
            for head in range(heads):
                cache = outputs["wide"][leaf].at[row, first + head, pl.ds(start(tile, head), tile.shape[1])]
                ends = (tile.at[head], cache) if into_cache else (cache, tile.at[head])
                made.append(pltpu.make_async_copy(*ends, semaphores.at[leaf, head]))
        return made

    for copy in (reading := copies(into_cache=False)):
        copy.start()

    # A row of padding writes nothing: its tiles go back as they came.
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

    for copy in reading:
        copy.wait()
    for leaf, tile in enumerate(tiles):
        counted = jnp.float32 if jnp.issubdtype(tile.dtype, jnp.floating) else jnp.int32
        taken, new = outputs["taken"][leaf], refs["wide_new"][leaf]
        for head in range(heads):
            old = tile[head].astype(counted)
            chosen = jax.lax.broadcasted_iota(jnp.int32, old.shape, 0) == slots[head] - start(tile, head)
            here_only = jnp.where(chosen, old, jnp.zeros_like(old)).sum(0, keepdims=True)
            taken[0, pl.ds(head, 1)] = here_only.astype(taken.dtype)
            value = new[0, pl.ds(head, 1)].astype(counted)
            tile[head] = jnp.where(chosen & writes, value, old).astype(tile.dtype)
    for copy in (writing := copies(into_cache=True)):
        copy.start()
    for copy in writing:
        copy.wait()


def _chosen(values: Array, chosen: Array) -> Array:
    """The one number of each row that is chosen."""
    # TPUs sum no unsigned integers.
    unsigned = values.dtype == jnp.uint32
    signed = jax.lax.bitcast_convert_type(values, jnp.int32) if unsigned else values
    total = jnp.where(chosen, signed, jnp.zeros_like(signed)).sum(-1, keepdims=True)
    return jax.lax.bitcast_convert_type(total, jnp.uint32) if unsigned else total
