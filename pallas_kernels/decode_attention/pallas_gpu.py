"""Decode attention for GPU through Pallas's Triton lowering: each program handles one split of a head's slots.

Splits are independent, with partial sums in float32. XLA merges them, and turns the logits that the kernel wrote into
scores, elementwise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_kernels.attention import AttentionSpec, add_logits, log_sum, pad_to
from pallas_kernels.blocks import block, made, run
from pallas_kernels.decode_attention.api import DecodeAttention, Decoded, LowRank
from pallas_kernels.decode_attention.kernel_parts import LOWEST, placed, seen, stored, tempered
from pallas_kernels.decode_attention.partials import ROWS, Parts, channels, merged, tile
from pallas_kernels.quantised import halves

PARAMS = plgpu.CompilerParams(num_warps=4, num_stages=2)


def decode_attention(x: DecodeAttention, *, interpret: Any) -> Decoded:
    b, h, g, d = x.q.shape
    c, e = x.v.shape[2:]
    size, split = tile(b * h, c, max(d, e) * x.q.dtype.itemsize)
    splits = pl.cdiv(c, split)
    parts = splits + (x.low_rank is not None)

    def of_head(*tail: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *tail), lambda s, h, b: (b, h) + (0,) * len(tail))

    def of_slots(width: int | None, channels: int) -> pl.BlockSpec:
        return of_head(c) if width is None else of_head(c, width)

    def low_rank(share: LowRank) -> LowRank:
        features, single = share.features.shape[-1], jax.tree.map(lambda y: y.astype(jnp.float32), share)
        return LowRank(
            block(jnp.moveaxis(pad_to(single.features, 2, ROWS), -1, 2), of_head(features, ROWS)),
            block(single.h, of_head(features, e)),
            block(single.z, of_head(features)),
        )

    of_row = pl.BlockSpec((1,), lambda s, h, b: (b,))
    gumbel = x.gumbel
    if gumbel is not None:
        numbers = dict(seed=gumbel.seed, tau=gumbel.tau.astype(jnp.float32), first=gumbel.first)
        gumbel = dataclasses.replace(
            gumbel, **{name: None if y is None else block(y, of_row) for name, y in numbers.items()}
        )
    inputs = DecodeAttention(
        q=block(pad_to(x.q, 2, ROWS), of_head(ROWS, d)),
        k=placed(x.k, of_slots),
        v=placed(x.v, of_slots),
        position=block(x.position, of_head(c)),
        query_position=block(x.query_position, of_row),
        spec=placed_spec(x.spec),
        low_rank=None if x.low_rank is None else low_rank(x.low_rank),
        scores=gumbel,
    )
    of_parts = parts_of(b, h, parts, e)
    outputs = Parts(
        *of_parts,
        logits=None if x.scores is None else made((b, h, g, c), of_head(g, c)),
        noisy_lse=None if gumbel is None else of_parts[1],
    )
    settings = dict(size=size, split=split, splits=splits, multiply=products(interpret))
    found = run(
        functools.partial(kernel, **settings),
        (inputs, None),
        outputs,
        grid=(parts, h, b),
        compiler_params=PARAMS,
        interpret=interpret,
        name="decode_attention",
    )
    return merged(found, g, splits, x.scores)


def placed_spec(spec: AttentionSpec) -> AttentionSpec:
    """Return settings whose slopes are a `blocks.block`."""
    if spec.slopes is None:
        return spec
    part = pl.BlockSpec((None, ROWS), lambda s, h, b: (h, 0))
    return dataclasses.replace(spec, slopes=block(pad_to(spec.slopes.astype(jnp.float32), 1, ROWS), part))


def parts_of(b: int, h: int, parts: int, e: int) -> tuple[Any, Any]:
    """Return the attention and the log-sum-exp of each part of each head, as results."""

    def of_part(*tail: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, None, *tail), lambda s, h, b: (b, h, s) + (0,) * len(tail))

    return made((b, h, parts, ROWS, e), of_part(ROWS, e)), made((b, h, parts, ROWS), of_part(ROWS))


class Span(NamedTuple):
    """Range of a head's slots in a pool."""

    begin: Any
    end: Any


def kernel(
    x: DecodeAttention,
    span: Span | None,
    outputs: Parts,
    *,
    size: int,
    split: Any,
    splits: int,
    multiply: Callable[[Array, Array], Array],
) -> None:
    """Attend to one split of a head's slots, or to its low-rank memory.

    Args:
        x: blocks of one head; of a pool, all slots.
        span: the head's range of a pool; None if all slots are the head's.
        size: slots of one step.
        split: slots of a split; any number for a `span`.
    """
    part, head = pl.program_id(0), pl.program_id(1)
    (capacity,), e, dtype = x.position.shape, outputs.out.shape[-1], x.q.dtype
    (k, k_scale), (v, v_scale) = stored(x.k), stored(x.v)
    begin, end = 0, capacity
    if span is not None:
        begin, end = span.begin[0], span.end[0]
        split = pl.cdiv(pl.cdiv(end - begin, splits), size) * size
    first = begin + part * split
    last = jnp.minimum(first + split, end)

    @pl.when(part < splits)
    def _() -> None:
        query = x.query_position[0]
        pieces = channels(x.q.shape[-1], dtype, in_halves(k))
        q = tuple(x.q[:, some] for some in pieces)
        rows = jax.lax.broadcasted_iota(jnp.int32, (ROWS, size), 0)

        def step(i: Array, carry: Any) -> Any:
            acc, top, total, noisy_top, noisy_total = carry
            start = first + i * size
            slot = start + jax.lax.broadcasted_iota(jnp.int32, (size,), 0)
            inside = slot < last
            here = pl.ds(start, size)
            ragged = span is not None or capacity % size != 0

            def read(ref: Any, other: float = 0.0, some: slice | None = None) -> Array:
                ref = ref.at[here] if some is None else ref.at[here, some]
                if not ragged:
                    return ref[...]
                mask = jax.lax.broadcast_in_dim(inside, ref.shape, (0,))
                return plgpu.load(ref, mask=mask, other=other)

            def pieces_of(ref: Any, pieces: tuple[slice | None, ...] = (None,)) -> tuple[Array, ...]:
                found = halves(read(ref)) if in_halves(ref) else (read(ref, some=some) for some in pieces)
                return tuple(y.astype(dtype) for y in found)

            at = read(x.position, -1)
            visible = seen(at, query, x.spec.window)
            visible = jax.lax.broadcast_in_dim(visible, (ROWS, size), (1,))
            products = functools.reduce(jnp.add, map(multiply, q, (y.T for y in pieces_of(k, pieces))))
            logits = x.spec.capped(products if k_scale is None else products * read(k_scale)[None, :])
            if x.spec.slopes is not None:
                logits += x.spec.slopes[...][:, None] * (at - query).astype(jnp.float32)[None, :]
            logits = jnp.where(visible, logits, LOWEST)
            weights, kept, top, total = add_logits(top, total, logits)
            scaled = weights if v_scale is None else weights * read(v_scale)[None, :]
            scaled = scaled.astype(dtype)
            acc = tuple(kept[:, None] * some + multiply(scaled, y) for some, y in zip(acc, pieces_of(v), strict=True))
            if x.gumbel is not None:
                number = (head if x.gumbel.first is None else head + x.gumbel.first[0]).astype(jnp.uint32)
                logits = tempered(logits, visible, x.gumbel, x.gumbel.seed[0], x.gumbel.tau[0], number, at)
                *_, noisy_top, noisy_total = add_logits(noisy_top, noisy_total, logits)
            if outputs.logits is not None:
                columns = jax.lax.broadcast_in_dim(slot, (ROWS, size), (1,))
                groups = outputs.logits.shape[0 if span is None else 1]
                real = (rows < groups) & (columns < last)
                place = (rows, columns)
                if span is not None:
                    page = jnp.full((ROWS, size), outputs.logits.shape[2], jnp.int32)
                    place = (jax.lax.div(columns, page), rows, jax.lax.rem(columns, page))
                plgpu.store(outputs.logits.at[place], logits, mask=real)
            return acc, top, total, noisy_top, noisy_total

        lowest, nothing = jnp.full(ROWS, LOWEST / 2, jnp.float32), jnp.zeros(ROWS, jnp.float32)
        blocks = jnp.maximum(last - first + size - 1, 0) // size
        widths = (e // 2, e // 2) if in_halves(v) else (e,)
        start = (tuple(jnp.zeros((ROWS, some), jnp.float32) for some in widths), lowest, nothing, lowest, nothing)
        acc, top, total, noisy_top, noisy_total = jax.lax.fori_loop(0, blocks, step, start)
        for i, some in enumerate(acc):
            columns = slice(i * widths[0], (i + 1) * widths[0])
            outputs.out[:, columns] = some / jnp.where(total > 0, total, 1.0)[:, None]
        outputs.lse[...] = log_sum(top, total, LOWEST)
        if outputs.noisy_lse is not None:
            outputs.noisy_lse[...] = log_sum(noisy_top, noisy_total, LOWEST)

    if x.low_rank is not None:
        share = x.low_rank

        @pl.when(part == splits)
        def _() -> None:
            def add(r: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
                acc, mass = carry
                phi = share.features[r]
                return acc + phi[:, None] * share.h[r][None, :], mass + phi * share.z[r]

            start = (jnp.zeros((ROWS, e), jnp.float32), jnp.zeros(ROWS, jnp.float32))
            acc, mass = jax.lax.fori_loop(0, share.features.shape[0], add, start)
            outputs.out[...] = jnp.where(mass > 0, 1.0, 0.0)[:, None] * acc / jnp.where(mass > 0, mass, 1.0)[:, None]
            outputs.lse[...] = log_sum(jnp.zeros_like(mass), mass, LOWEST)
            if outputs.noisy_lse is not None:
                outputs.noisy_lse[...] = jnp.full(ROWS, LOWEST, jnp.float32)


def in_halves(codes: Array) -> bool:
    """Return whether keys or values are codes of four bits, whose two halves need separate products."""
    return codes.dtype == jnp.uint8


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
