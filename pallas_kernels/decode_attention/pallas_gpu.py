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

from pallas_kernels.attention import add_logits, log_sum, pad_to
from pallas_kernels.blocks import input_block, output_block, run
from pallas_kernels.decode_attention.api import DecodeAttention, Decoded, LowRank
from pallas_kernels.decode_attention.kernel_parts import LOWEST, array_and_scale, noisy_logits, visible_slots
from pallas_kernels.decode_attention.splits import SplitOutputs, channels, merge_splits, rows_of, split_of, tile
from pallas_kernels.quantised import halves

PARAMS = plgpu.CompilerParams(num_warps=4, num_stages=2)


def decode_attention(x: DecodeAttention, *, interpret: Any) -> Decoded:
    b, h, g, d = x.q.shape
    c, e = x.values.shape[2:]
    size, splits = tile(b * h, c, max(d, e) * x.q.dtype.itemsize)
    logits = None if x.scores is None else output_block((b, h, g, c), of_head(g, c))
    of_slots = functools.partial(of_head, c)
    parts = attend_parts(
        x, of_slots, None, logits, size=size, splits=splits, interpret=interpret, name="decode_attention"
    )
    return merge_splits(parts, g, splits, x.scores)


def of_head(*tail: int) -> pl.BlockSpec:
    """Return the spec of all numbers of a head."""
    return pl.BlockSpec((None, None, *tail), lambda s, h, b: (b, h) + (0,) * len(tail))


class Span(NamedTuple):
    """Range of a head's slots in a pool."""

    begin: Any
    end: Any


def attend_parts(
    x: DecodeAttention,
    of_slots: Callable[..., pl.BlockSpec],
    span: Span | None,
    logits: Any,
    *,
    size: int,
    splits: int,
    interpret: Any,
    name: str,
) -> SplitOutputs:
    """Attend to each split of each head's slots, `size` of them at a time, and to its low-rank memory.

    Args:
        of_slots: returns the spec of slots, given the sizes of the axes that follow them.
        span: range of each head's slots, if they are in one pool; None if each head has its own.
        logits: where to write the logits of the slots; None for nowhere.
    """
    (b, h, g, d), parts = x.q.shape, splits + (x.low_rank is not None)
    rows = rows_of(g)

    def of_part(*tail: int) -> Any:
        spec = pl.BlockSpec((None, None, None, *tail), lambda s, h, b: (b, h, s) + (0,) * len(tail))
        return output_block((b, h, parts, *tail), spec)

    def of_row(numbers: Array | None) -> Any:
        return None if numbers is None else input_block(numbers, pl.BlockSpec((1,), lambda s, h, b: (b,)))

    def slots(numbers: Array) -> Any:
        return input_block(numbers, of_slots(*numbers.shape[x.position.ndim :]))

    slopes, low_rank, noise = x.spec.slopes, x.low_rank, x.score_noise
    if slopes is not None:
        of_group = pl.BlockSpec((None, rows), lambda s, h, b: (h, 0))
        slopes = input_block(pad_to(slopes.astype(jnp.float32), 1, rows), of_group)
    if low_rank is not None:
        phi, memory, z = (y.astype(jnp.float32) for y in low_rank)
        phi = jnp.moveaxis(pad_to(phi, 2, rows), -1, 2)
        low_rank = LowRank(*(input_block(y, of_head(*y.shape[2:])) for y in (phi, memory, z)))
    if noise is not None:
        seed, tau, first = map(of_row, (noise.seed, noise.tau.astype(jnp.float32), noise.first))
        noise = dataclasses.replace(noise, seed=seed, tau=tau, first=first)
    inputs = DecodeAttention(
        q=input_block(pad_to(x.q, 2, rows), of_head(rows, d)),
        k=jax.tree.map(slots, x.k),
        v=jax.tree.map(slots, x.values),
        position=slots(x.position),
        query_position=of_row(x.query_position),
        spec=dataclasses.replace(x.spec, slopes=slopes),
        low_rank=low_rank,
        scores=noise,
    )
    lse = of_part(rows)
    return run(
        functools.partial(_kernel, size=size, splits=splits, multiply=multiplication(interpret)),
        (inputs, span),
        SplitOutputs(of_part(rows, x.values.shape[-1]), lse, logits, None if noise is None else lse),
        grid=(parts, h, b),
        compiler_params=PARAMS,
        interpret=interpret,
        name=name,
    )


def _kernel(
    x: DecodeAttention,
    span: Span | None,
    outputs: SplitOutputs,
    *,
    size: int,
    splits: int,
    multiply: Callable[[Array, Array], Array],
) -> None:
    part, head = pl.program_id(0), pl.program_id(1)
    (capacity,), (rows, e), dtype = x.position.shape, outputs.out.shape, x.q.dtype
    (k, k_scale), (v, v_scale) = array_and_scale(x.k), array_and_scale(x.values)
    begin, end = (0, capacity) if span is None else (span.begin[0], span.end[0])
    split = split_of(end - begin, splits, size)
    first = begin + part * split
    last = jnp.minimum(first + split, end)

    @pl.when(part < splits)
    def _() -> None:
        query = x.query_position[0]
        pieces = channels(x.q.shape[-1], dtype, in_halves(k))
        q = tuple(x.q[:, piece] for piece in pieces)
        row = jax.lax.broadcasted_iota(jnp.int32, (rows, size), 0)

        def step(i: Array, carry: Any) -> Any:
            acc, top, total, noisy_top, noisy_total = carry
            start = first + i * size
            slot = start + jax.lax.broadcasted_iota(jnp.int32, (size,), 0)
            inside = slot < last
            block = pl.ds(start, size)
            ragged = span is not None or capacity % size != 0

            def read(ref: Any, fill: float = 0.0, piece: slice | None = None) -> Array:
                ref = ref.at[block] if piece is None else ref.at[block, piece]
                if not ragged:
                    return ref[...]
                mask = jax.lax.broadcast_in_dim(inside, ref.shape, (0,))
                return plgpu.load(ref, mask=mask, other=fill)

            def pieces_of(ref: Any, pieces: tuple[slice | None, ...] = (None,)) -> tuple[Array, ...]:
                arrays = halves(read(ref)) if in_halves(ref) else (read(ref, piece=piece) for piece in pieces)
                return tuple(y.astype(dtype) for y in arrays)

            at = read(x.position, -1)
            visible = visible_slots(at, query, x.spec.window)
            visible = jax.lax.broadcast_in_dim(visible, (rows, size), (1,))
            products = functools.reduce(jnp.add, map(multiply, q, (y.T for y in pieces_of(k, pieces))))
            logits = x.spec.capped(products if k_scale is None else products * read(k_scale)[None, :])
            if x.spec.slopes is not None:
                logits += x.spec.slopes[...][:, None] * (at - query).astype(jnp.float32)[None, :]
            logits = jnp.where(visible, logits, LOWEST)
            weights, correction, top, total = add_logits(top, total, logits)
            scaled = weights if v_scale is None else weights * read(v_scale)[None, :]
            scaled = scaled.astype(dtype)
            parts = zip(acc, pieces_of(v), strict=True)
            acc = tuple(correction[:, None] * out + multiply(scaled, y) for out, y in parts)
            if (noise := x.score_noise) is not None:
                number = (head if noise.first is None else head + noise.first[0]).astype(jnp.uint32)
                logits = noisy_logits(logits, visible, noise, noise.seed[0], noise.tau[0], number, at)
                *_, noisy_top, noisy_total = add_logits(noisy_top, noisy_total, logits)
            if outputs.logits is not None:
                columns = jax.lax.broadcast_in_dim(slot, (rows, size), (1,))
                groups = outputs.logits.shape[0 if span is None else 1]
                real = (row < groups) & (columns < last)
                place = (row, columns)
                if span is not None:
                    page = jnp.full((rows, size), outputs.logits.shape[2], jnp.int32)
                    place = (jax.lax.div(columns, page), row, jax.lax.rem(columns, page))
                plgpu.store(outputs.logits.at[place], logits, mask=real)
            return acc, top, total, noisy_top, noisy_total

        lowest, nothing = jnp.full(rows, LOWEST / 2, jnp.float32), jnp.zeros(rows, jnp.float32)
        blocks = jnp.maximum(last - first + size - 1, 0) // size
        widths = (e // 2, e // 2) if in_halves(v) else (e,)
        start = (tuple(jnp.zeros((rows, width), jnp.float32) for width in widths), lowest, nothing, lowest, nothing)
        acc, top, total, noisy_top, noisy_total = jax.lax.fori_loop(0, blocks, step, start)
        for i, part_out in enumerate(acc):
            columns = slice(i * widths[0], (i + 1) * widths[0])
            outputs.out[:, columns] = part_out / jnp.where(total > 0, total, 1.0)[:, None]
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

            start = (jnp.zeros((rows, e), jnp.float32), jnp.zeros(rows, jnp.float32))
            acc, mass = jax.lax.fori_loop(0, share.features.shape[0], add, start)
            outputs.out[...] = jnp.where(mass > 0, 1.0, 0.0)[:, None] * acc / jnp.where(mass > 0, mass, 1.0)[:, None]
            outputs.lse[...] = log_sum(jnp.zeros_like(mass), mass, LOWEST)
            if outputs.noisy_lse is not None:
                outputs.noisy_lse[...] = jnp.full(rows, LOWEST, jnp.float32)


def in_halves(codes: Array) -> bool:
    """Return whether keys or values are codes of four bits, whose two halves need separate products."""
    return codes.dtype == jnp.uint8


def multiplication(interpret: Any) -> Callable[[Array, Array], Array]:
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
