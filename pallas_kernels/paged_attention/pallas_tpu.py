"""Attention over pages for TPU: each step takes some pages of one head, while those of the next step arrive.

The number of steps, and the pages of each, are known only at run time. Steps run in order, so running maxima and sums
stay in scratch memory.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import AttentionSpec
from pallas_kernels.common import SUBLANES, padded, tpu_params
from pallas_kernels.decode_attention.kernel_parts import LOWEST, multiplies_integers, products, seen, stored, weighted
from pallas_kernels.operands import Operand
from pallas_kernels.paged_attention.pages import most_steps, ranges, tile
from pallas_kernels.paged_attention.types import Paged

VMEM_BYTES = 14 << 20


def paged_attention(
    q: Float[Array, "b h g d"],
    k: Operand,
    v: Operand,
    position: Int[Array, "P s"],
    owner: Int[Array, " P"],
    pages: Int[Array, "2"],
    query_position: Int[Array, " b"],
    spec: AttentionSpec,
    *,
    layers: int,
    interpret: Any,
) -> Paged:
    """See `api.paged_attention`."""
    (b, h, g, d), e = q.shape, v.shape[-1]
    count, size = position.shape
    block, rows = tile(b * h, layers, count, size), padded(g, SUBLANES)
    begin, end = ranges(owner, pages, b * h)
    # A head without pages takes a step as well, which writes zeros.
    steps = jnp.maximum(1, pl.cdiv(end - begin, block))
    last = jnp.cumsum(steps)
    scalars = {
        "owner": jnp.repeat(jnp.arange(b * h), steps, total_repeat_length=most_steps(b * h, count, block)),
        "first": last - steps,
        "begin": begin,
        "end": end,
        "query_position": query_position,
    }
    scalars = {name: x.astype(jnp.int32) for name, x in scalars.items()}

    def pad(x: Array) -> Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rows - g), (0, 0)])

    def of_head(*tail: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *tail), lambda i, scalars: (scalars["owner"][i],) + (0,) * len(tail))

    def of_pages(i: Array, scalars: Any) -> tuple[Array, int, int]:
        return _place(i, scalars, block, count)[1], 0, 0

    def per_slot(*tail: int) -> pl.BlockSpec:
        return pl.BlockSpec(tuple(pl.Element(x) for x in (block, *tail)), of_pages)

    inputs: dict[str, tuple[Array, pl.BlockSpec]] = {
        "q": (pad(q).reshape(b * h, rows, d), of_head(rows, d)),
        "position": (position[:, None], per_slot(1, size)),
    }
    for name, operand in (("k", k), ("v", v)):
        array, scale = stored(operand)
        inputs[name] = (array, per_slot(*array.shape[1:]))
        if scale is not None:
            inputs[f"{name}_scale"] = (scale[:, None], per_slot(1, size))
    if spec.slopes is not None:
        of_group = pl.BlockSpec((1, rows, 1), lambda i, scalars: (scalars["owner"][i] % h, 0, 0))
        inputs["slopes"] = (pad(spec.slopes.astype(jnp.float32)[..., None]), of_group)
    outputs: dict[str, tuple[tuple[int, ...], pl.BlockSpec]] = {
        "out": ((b * h, rows, e), of_head(rows, e)),
        "lse": ((b * h, rows, 1), of_head(rows, 1)),
        # The array has room for a whole block that begins with the last page.
        "logits": ((count + block, g, size), pl.BlockSpec(memory_space=pl.ANY)),
    }
    scratch = {
        "acc": pltpu.VMEM((rows, e), jnp.float32),
        "top": pltpu.VMEM((rows, 1), jnp.float32),
        "total": pltpu.VMEM((rows, 1), jnp.float32),
        "logits": pltpu.VMEM((2 * block, g, size), jnp.float32),
        "written": pltpu.SemaphoreType.DMA(()),
    }
    found = pl.pallas_call(
        functools.partial(
            _kernel,
            heads=h,
            pool=count,
            spec=dataclasses.replace(spec, slopes=None),
            integers=multiplies_integers(interpret),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(last[-1],),
            in_specs=[{name: spec for name, (_, spec) in inputs.items()}],
            out_specs={name: spec for name, (_, spec) in outputs.items()},
            scratch_shapes=[scratch],
        ),
        out_shape={name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, (shape, _) in outputs.items()},
        compiler_params=tpu_params(0, 1, VMEM_BYTES),
        interpret=interpret,
        name="paged_attention",
    )(scalars, {name: array for name, (array, _) in inputs.items()})
    out, lse = (found[name].reshape(b, h, rows, -1)[:, :, :g] for name in ("out", "lse"))
    logits = found["logits"]
    if g == 1:
        # Readers need pages along lanes: on v6e, transposing two dimensions takes an eighth of the cycles of three.
        logits = jax.lax.optimization_barrier(logits[:, 0])[:, None]
    return Paged(out, lse[..., 0], logits)


def _place(i: Array, scalars: Any, block: int, pool: int) -> tuple[Array, Array]:
    # The first page of a step, and of its block: at the pool's end the block begins earlier.
    owner = scalars["owner"][i]
    page = scalars["begin"][owner] + (i - scalars["first"][owner]) * block
    return page, jnp.minimum(page, pool - block)


def _kernel(
    scalars: Any,
    refs: Any,
    outputs: Any,
    scratch: Any,
    *,
    heads: int,
    pool: int,
    spec: AttentionSpec,
    integers: bool,
) -> None:
    i = pl.program_id(0)
    owner = scalars["owner"][i]
    block, _, size = refs["position"].shape
    groups = outputs["logits"].shape[1]
    page, at = _place(i, scalars, block, pool)
    mine = jnp.clip(scalars["end"][owner] - page, 0, block)

    @pl.when(page == scalars["begin"][owner])
    def _() -> None:
        for name, value in (("acc", 0.0), ("top", LOWEST / 2), ("total", 0.0)):
            scratch[name][...] = jnp.full(scratch[name].shape, value, jnp.float32)

    def row(name: str) -> Array:  # numbers of all slots, side by side
        return jnp.concatenate([refs[name][page] for page in range(block)], axis=1)

    def real(shape: tuple[int, ...], axis: int, each: int = 1) -> Array:
        # A block may begin before these pages and end after them.
        which = jax.lax.broadcasted_iota(jnp.int32, shape, axis) + (at - page) * each
        return (which >= 0) & (which < mine * each)

    position, query = row("position"), scalars["query_position"][owner // heads]
    visible = seen(position, query, spec.window) & real(position.shape, 1, size)
    k_scale, v_scale = (row(name) if name in refs else None for name in ("k_scale", "v_scale"))
    k, v = refs["k"][...], refs["v"][...]
    if v_scale is None:
        v = jnp.where(real(v.shape, 0), v, jnp.zeros_like(v))  # a weight of 0 does not remove another head's NaN
    else:
        v_scale = jnp.where(real(v_scale.shape, 1, size), v_scale, 0.0)
    k, v = (x.reshape(1, block * size, -1) for x in (k, v))
    x = spec.capped(products(refs["q"][...], k, k_scale, 2, integers))[0]
    if "slopes" in refs:
        x += refs["slopes"][0] * (position - query).astype(jnp.float32)
    x = jnp.where(visible, x, LOWEST)
    highest = jnp.maximum(scratch["top"][...], x.max(-1, keepdims=True))
    weights = jnp.exp(x - highest)
    kept = jnp.exp(scratch["top"][...] - highest)
    scratch["total"][...] = kept * scratch["total"][...] + weights.sum(-1, keepdims=True)
    scratch["acc"][...] = kept * scratch["acc"][...] + weighted(weights[None], v, v_scale, 2, integers)[0]
    scratch["top"][...] = highest

    # A whole block is copied out, and later steps overwrite what follows these pages. A block that begins earlier
    # copies only its own pages.
    sent = scratch["logits"].at[pl.ds(block, block)]
    leaving = pltpu.make_async_copy(sent, outputs["logits"].at[pl.ds(page, block)], scratch["written"])

    @pl.when(i > 0)
    def _() -> None:
        leaving.wait()  # awaits the copy of the step before, which is as large

    for each in range(block):
        scratch["logits"][block + each - (page - at)] = x[:groups, each * size : (each + 1) * size]
    leaving.start()

    @pl.when(i == pl.num_programs(0) - 1)
    def _() -> None:
        leaving.wait()

    @pl.when(page + block >= scalars["end"][owner])
    def _() -> None:
        total = scratch["total"][...]
        some = total > 0
        total = jnp.where(some, total, 1.0)
        outputs["out"][0] = scratch["acc"][...] / total
        outputs["lse"][0] = jnp.where(some, scratch["top"][...] + jnp.log(total), -jnp.inf)
