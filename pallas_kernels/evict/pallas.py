"""Eviction for TPU, in place: pairs by an aligned read-modify-write, what is one number per slot as whole blocks.

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
from jaxtyping import Array, Float, Int

from pallas_kernels.common import SUBLANES
from pallas_kernels.ranking import Protection, victim

ROWS = 16
"""Slots of one aligned copy: a tile of bfloat16, two of float32."""
VMEM_BYTES = 14 << 20


def evict(
    scores: Float[Array, "b h c"],
    position: Int[Array, "b h c"],
    new_position: Int[Array, " b"],
    buffers: Any,
    added: Any,
    *,
    protection: Protection,
    shrinks: bool,
    interpret: Any,
) -> tuple[Array, Array, Any, Array, Any]:
    """See `api.evict`."""
    b, h, c = position.shape
    heads = SUBLANES if h % SUBLANES == 0 else h
    leaves, tree = jax.tree.flatten(buffers)
    values = [value.astype(leaf.dtype) for leaf, value in zip(leaves, jax.tree.leaves(added), strict=True)]
    wide = [i for i, leaf in enumerate(leaves) if leaf.ndim == 4]
    narrow = [i for i, leaf in enumerate(leaves) if leaf.ndim == 3]

    def block(*tail: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, heads, *tail), lambda b, h: (b, h) + (0,) * len(tail))

    inputs = {
        "new_position": (new_position, pl.BlockSpec(memory_space=pltpu.SMEM)),
        "scores": (scores.astype(jnp.float32), block(c)),
        **{name: (x.astype(jnp.int32)[..., None], block(1)) for name, x in protection._asdict().items()},
        "position": (position, block(c)),
        "narrow": ([leaves[i] for i in narrow], [block(c)] * len(narrow)),
        "narrow_new": ([values[i][..., None] for i in narrow], [block(1)] * len(narrow)),
        "wide": ([leaves[i] for i in wide], [pl.BlockSpec(memory_space=pl.ANY)] * len(wide)),
        "wide_new": ([values[i] for i in wide], [block(leaves[i].shape[-1]) for i in wide]),
    }
    arrays = {name: array for name, (array, _) in inputs.items()}
    specs = {name: spec for name, (_, spec) in inputs.items()}
    out_specs = {
        "slot": block(1),
        "taken": [block(leaves[i].shape[-1]) for i in wide],
        "taken_narrow": [block(1)] * (len(narrow) + 1),
        **{name: specs[name] for name in ("position", "narrow", "wide")},
    }

    def shaped(x: Array, *tail: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((b, h, *tail), x.dtype)

    out_shape = {
        "slot": shaped(position, 1),
        "taken": [shaped(leaves[i], leaves[i].shape[-1]) for i in wide],
        "taken_narrow": [shaped(x, 1) for x in (position, *arrays["narrow"])],
        "position": shaped(position, c),
        "narrow": [shaped(x, c) for x in arrays["narrow"]],
        "wide": [shaped(x, *x.shape[2:]) for x in arrays["wide"]],
    }
    found = pl.pallas_call(
        functools.partial(_kernel, shrinks=shrinks),
        grid=(b, pl.cdiv(h, heads)),
        in_specs=[specs],
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[
            [pltpu.VMEM((heads, ROWS, leaves[i].shape[-1]), leaves[i].dtype) for i in wide],
            pltpu.SemaphoreType.DMA((max(1, len(wide)), heads)),
        ],
        input_output_aliases=_aliases(arrays, out_shape),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="evict",
    )(arrays)
    old = dict(zip(wide, found["taken"], strict=True))
    old |= {i: x[..., 0] for i, x in zip(narrow, found["taken_narrow"][1:], strict=True)}
    new = dict(zip(wide, found["wide"], strict=True)) | dict(zip(narrow, found["narrow"], strict=True))
    count = range(len(leaves))
    taken, written = (jax.tree.unflatten(tree, [x[i] for i in count]) for x in (old, new))
    return found["slot"][..., 0], found["taken_narrow"][0][..., 0], taken, found["position"], written


def _aliases(arrays: Any, out_shape: Any) -> dict[int, int]:
    # Leaves of the same name and place share a buffer.
    def places(tree: Any) -> dict[str, int]:
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
        return {path: i for i, path in enumerate(paths)}

    ins, outs = places(arrays), places(out_shape)
    return {ins[path]: outs[path] for path in outs if path in ins}


def _kernel(refs, outputs, tiles, semaphores, *, shrinks):
    row, first = pl.program_id(0), pl.program_id(1) * refs["position"].shape[1]
    heads, capacity = refs["position"].shape[1:]
    position, newest = refs["position"][0], refs["new_position"][row]
    bounds = [refs[name][0] for name in Protection._fields]
    slot = victim(refs["scores"][0], position, newest, *bounds, shrinks=shrinks)
    slots = [jnp.where(jax.lax.broadcasted_iota(jnp.int32, slot.shape, 0) == i, slot, 0).sum() for i in range(heads)]
    starts = [pl.multiple_of(x & -ROWS, ROWS) for x in slots]

    def copies(into_cache: bool) -> list[Any]:
        made = []
        for leaf, tile in enumerate(tiles):
            for head in range(heads):
                cache = outputs["wide"][leaf].at[row, first + head, pl.ds(starts[head], ROWS)]
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
        outputs["taken_narrow"][i + 1][0] = jnp.where(here, values, jnp.zeros_like(values)).sum(-1, keepdims=True)
        outputs["narrow"][i][0] = jnp.where(here & writes, new[0], values)
    outputs["slot"][0] = jnp.where(writes, slot, capacity)

    for copy in reading:
        copy.wait()
    for leaf, tile in enumerate(tiles):
        for head in range(heads):
            old = tile[head].astype(jnp.float32)
            chosen = jax.lax.broadcasted_iota(jnp.int32, old.shape, 0) == slots[head] - starts[head]
            outputs["taken"][leaf][0, pl.ds(head, 1)] = (
                jnp.where(chosen, old, 0.0).sum(0, keepdims=True).astype(tile.dtype)
            )
            new = refs["wide_new"][leaf][0, pl.ds(head, 1)].astype(jnp.float32)
            tile[head] = jnp.where(chosen & writes, new, old).astype(tile.dtype)
    for copy in (writing := copies(into_cache=True)):
        copy.start()
    for copy in writing:
        copy.wait()
