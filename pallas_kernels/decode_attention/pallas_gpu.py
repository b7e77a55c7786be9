"""Decode attention for GPU through Pallas's Triton lowering: each program handles one split of a head's slots.

Splits are independent, with partial sums in float32. XLA merges them, and turns the logits that the kernel wrote into
scores, elementwise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import AttentionSpec
from pallas_kernels.decode_attention.kernel_parts import LOWEST, seen, stored, tempered
from pallas_kernels.decode_attention.partials import ROWS, channels, merged, tile
from pallas_kernels.decode_attention.types import Decoded, Gumbel, LowRank
from pallas_kernels.operands import Operand
from pallas_kernels.quantised import halves


def decode_attention(
    q: Float[Array, "b h g d"],
    k: Operand,
    v: Operand,
    position: Int[Array, "b h c"],
    query_position: Int[Array, " b"],
    spec: AttentionSpec,
    *,
    low_rank: LowRank | None,
    scores: str | Gumbel | None,
    interpret: Any,
) -> Decoded:
    """See `api.decode_attention`."""
    b, h, g, d = q.shape
    c, e = v.shape[2:]
    block, split = tile(b * h, c, max(d, e) * q.dtype.itemsize)
    splits = pl.cdiv(c, split)
    parts = splits + (low_rank is not None)

    def padded(x: Array, axis: int) -> Array:
        return jnp.pad(x, [(0, ROWS - g if i == axis else 0) for i in range(x.ndim)])

    def of_head(*tail: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *tail), lambda s, h, b: (b, h) + (0,) * len(tail))

    def of_part(*tail: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, None, *tail), lambda s, h, b: (b, h, s) + (0,) * len(tail))

    of_row = pl.BlockSpec((1,), lambda s, h, b: (b,))
    inputs: dict[str, tuple[Array, pl.BlockSpec]] = {
        "query_position": (query_position, of_row),
        "q": (padded(q, 2), of_head(ROWS, d)),
        "position": (position, of_head(c)),
    }
    for name, operand in (("k", k), ("v", v)):
        array, scale = stored(operand)
        inputs[name] = (array, of_head(*array.shape[2:]))
        if scale is not None:
            inputs[f"{name}_scale"] = (scale, of_head(c))
    if spec.slopes is not None:
        inputs["slopes"] = (
            padded(spec.slopes.astype(jnp.float32), 1),
            pl.BlockSpec((None, ROWS), lambda s, h, b: (h, 0)),
        )
    if low_rank is not None:
        features = low_rank.features.shape[-1]
        phi = jnp.moveaxis(padded(low_rank.features.astype(jnp.float32), 2), -1, 2)
        inputs["phi"] = (phi, of_head(features, ROWS))
        inputs["h"] = (low_rank.h.astype(jnp.float32), of_head(features, e))
        inputs["z"] = (low_rank.z.astype(jnp.float32), of_head(features))
    if isinstance(scores, Gumbel):
        inputs["seed"] = (scores.seed, of_row)
        inputs["tau"] = (scores.tau.astype(jnp.float32), of_row)
        if scores.first is not None:
            inputs["first"] = (scores.first, of_row)

    outputs: dict[str, tuple[tuple[int, ...], pl.BlockSpec]] = {
        "out": ((b, h, parts, ROWS, e), of_part(ROWS, e)),
        "lse": ((b, h, parts, ROWS), of_part(ROWS)),
    }
    if scores is not None:
        outputs["logits"] = ((b, h, g, c), of_head(g, c))
    if isinstance(scores, Gumbel):
        outputs["noisy_lse"] = ((b, h, parts, ROWS), of_part(ROWS))

    static = scores.static if isinstance(scores, Gumbel) else scores
    told = dataclasses.replace(spec, slopes=None)
    settings: dict[str, Any] = dict(block=block, split=split, splits=splits, groups=g, spec=told, scores=static)
    compiled = functools.partial(kernel, **settings, multiply=products(interpret))
    found = launch(compiled, (parts, h, b), inputs, outputs, interpret=interpret, name="decode_attention")
    return merged(found, g, splits, scores)


def launch(
    compiled: Any,
    grid: tuple[int, ...],
    inputs: dict[str, tuple[Array, pl.BlockSpec]],
    outputs: dict[str, tuple[tuple[int, ...], pl.BlockSpec]],
    *,
    interpret: Any,
    name: str,
) -> dict[str, Array]:
    """Run a kernel on named arrays; its outputs are float32 of the given shapes."""
    return pl.pallas_call(
        compiled,
        grid=grid,
        in_specs=[{name: spec for name, (_, spec) in inputs.items()}],
        out_specs={name: spec for name, (_, spec) in outputs.items()},
        out_shape={name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, (shape, _) in outputs.items()},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name=name,
    )({name: array for name, (array, _) in inputs.items()})


def kernel(
    refs: Any,
    outputs: Any,
    *,
    block: int,
    split: Any,
    splits: int,
    groups: int,
    spec: AttentionSpec,
    scores: str | Gumbel | None,
    multiply: Callable[[Array, Array], Array],
) -> None:
    part, head = pl.program_id(0), pl.program_id(1)
    (capacity,), e = refs["position"].shape, outputs["out"].shape[-1]
    four = {name: refs[name].dtype == jnp.uint8 for name in "kv"}  # codes whose two halves need separate products
    gumbel, paged = isinstance(scores, Gumbel), "begin" in refs
    begin, end = 0, capacity
    if paged:  # a head's slots are a range of a pool's
        begin, end = refs["begin"][0], refs["end"][0]
        split = pl.cdiv(pl.cdiv(end - begin, splits), block) * block
    first = begin + part * split
    last = jnp.minimum(first + split, end)

    @pl.when(part < splits)
    def _() -> None:
        query = refs["query_position"][0]
        pieces = channels(refs["q"].shape[-1], refs["q"].dtype, four["k"])
        q = tuple(refs["q"][:, some] for some in pieces)
        rows = jax.lax.broadcasted_iota(jnp.int32, (ROWS, block), 0)

        def step(i: Array, carry: Any) -> Any:
            acc, top, total, noisy_top, noisy_total = carry
            start = first + i * block
            slot = start + jax.lax.broadcasted_iota(jnp.int32, (block,), 0)
            inside = slot < last
            here = pl.ds(start, block)
            ragged = paged or capacity % block != 0

            def read(name: str, other: float = 0.0, some: slice | None = None) -> Array:
                ref = refs[name].at[here] if some is None else refs[name].at[here, some]
                if not ragged:
                    return ref[...]
                mask = jax.lax.broadcast_in_dim(inside, ref.shape, (0,))
                return plgpu.load(ref, mask=mask, other=other)

            def parts_of(name: str, pieces: tuple[slice | None, ...] = (None,)) -> tuple[Array, ...]:
                found = halves(read(name)) if four[name] else (read(name, some=some) for some in pieces)
                return tuple(x.astype(refs["q"].dtype) for x in found)

            at = read("position", -1)
            visible = seen(at, query, spec.window)
            visible = jax.lax.broadcast_in_dim(visible, (ROWS, block), (1,))
            products = functools.reduce(jnp.add, map(multiply, q, (k.T for k in parts_of("k", pieces))))
            logits = spec.capped(products * read("k_scale")[None, :] if "k_scale" in refs else products)
            if "slopes" in refs:
                logits += refs["slopes"][...][:, None] * (at - query).astype(jnp.float32)[None, :]
            logits = jnp.where(visible, logits, LOWEST)
            highest = jnp.maximum(top, logits.max(1))
            weights, kept = jnp.exp(logits - highest[:, None]), jnp.exp(top - highest)
            total = kept * total + weights.sum(1)
            scaled = weights * read("v_scale")[None, :] if "v_scale" in refs else weights
            scaled = scaled.astype(refs["q"].dtype)
            acc = tuple(kept[:, None] * some + multiply(scaled, v) for some, v in zip(acc, parts_of("v"), strict=True))
            if isinstance(scores, Gumbel):
                number = (head + refs["first"][0] if "first" in refs else head).astype(jnp.uint32)
                logits = tempered(logits, visible, scores, refs["seed"][0], refs["tau"][0], number, at)
                noisy_highest = jnp.maximum(noisy_top, logits.max(1))
                kept = jnp.exp(noisy_top - noisy_highest)
                noisy_total = kept * noisy_total + jnp.exp(logits - noisy_highest[:, None]).sum(1)
                noisy_top = noisy_highest
            if "logits" in outputs:
                columns = jax.lax.broadcast_in_dim(slot, (ROWS, block), (1,))
                real = (rows < groups) & (columns < last)
                place = (rows, columns)
                if paged:
                    size = jnp.full((ROWS, block), outputs["logits"].shape[2], jnp.int32)
                    place = (jax.lax.div(columns, size), rows, jax.lax.rem(columns, size))
                plgpu.store(outputs["logits"].at[place], logits, mask=real)
            return acc, highest, total, noisy_top, noisy_total

        lowest, nothing = jnp.full(ROWS, LOWEST / 2, jnp.float32), jnp.zeros(ROWS, jnp.float32)
        blocks = jnp.maximum(last - first + block - 1, 0) // block
        widths = (e // 2, e // 2) if four["v"] else (e,)
        start = (tuple(jnp.zeros((ROWS, some), jnp.float32) for some in widths), lowest, nothing, lowest, nothing)
        acc, top, total, noisy_top, noisy_total = jax.lax.fori_loop(0, blocks, step, start)
        for i, some in enumerate(acc):
            columns = slice(i * widths[0], (i + 1) * widths[0])
            outputs["out"][:, columns] = some / jnp.where(total > 0, total, 1.0)[:, None]
        outputs["lse"][...] = _log(top, total)
        if gumbel:
            outputs["noisy_lse"][...] = _log(noisy_top, noisy_total)

    if "phi" in refs:

        @pl.when(part == splits)
        def _() -> None:
            features = refs["phi"].shape[0]

            def add(r: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
                acc, mass = carry
                phi = refs["phi"][r]
                return acc + phi[:, None] * refs["h"][r][None, :], mass + phi * refs["z"][r]

            start = (jnp.zeros((ROWS, e), jnp.float32), jnp.zeros(ROWS, jnp.float32))
            acc, mass = jax.lax.fori_loop(0, features, add, start)
            outputs["out"][...] = jnp.where(mass > 0, 1.0, 0.0)[:, None] * acc / jnp.where(mass > 0, mass, 1.0)[:, None]
            outputs["lse"][...] = _log(jnp.zeros_like(mass), mass)
            if "noisy_lse" in outputs:
                outputs["noisy_lse"][...] = jnp.full(ROWS, LOWEST, jnp.float32)


def _log(top: Array, total: Array) -> Array:
    return jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1.0)), LOWEST)


def products(interpret: Any) -> Callable[[Array, Array], Array]:
    """Return a function that multiplies matrices [n m] and [m o] in float32, inside a kernel with this `interpret`.

    Float32 is not rounded to the ten bits of the tensor cores. Each number is split into a sum of two such numbers,
    and their products are added. This takes fewer registers and less compile time than avoiding the tensor cores.
    """
    exact = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if interpret is False else jax.lax.Precision.HIGHEST

    def multiply(a: Array, b: Array) -> Array:
        return jax.lax.dot(
            a, b, precision=exact if a.dtype == jnp.float32 else None, preferred_element_type=jnp.float32
        )

    return multiply
