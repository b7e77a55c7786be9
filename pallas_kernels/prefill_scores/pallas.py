"""Prompt attention and its column sums for TPU, in two passes: what each query sums to, then what each key received.

Logits lie transposed, [keys, queries]: maxima and sums of a query's softmax then are rows along the lanes. The grids
are (rows, query heads, blocks of queries, blocks of keys) and (rows, heads, blocks of keys, query heads of a group,
blocks of queries); what comes after the first kind of blocks runs in order, so that sums stay in scratch memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import AttentionSpec
from pallas_kernels.prefill_scores.tiles import Tiles
from pallas_kernels.prefill_scores.types import Own, PromptAttention

LANES = 128
BLOCK = 512
"""Queries and keys of one grid step, at most."""
LOWEST = float(jnp.finfo(jnp.float32).min)


def prefill_scores(
    q: Float[Array, "b h g n d"],
    k: Float[Array, "b h c d"],
    v: Float[Array, "b h c e"],
    query_position: Int[Array, "b n"],
    key_position: Int[Array, "b #h c"],
    spec: AttentionSpec,
    weights: Float[Array, "b #h m n"] | None,
    noise: Float[Array, "b h c"] | None,
    own: Own | None,
    *,
    tau: float,
    scores: bool,
    interpret: Any,
) -> PromptAttention:
    """See `pallas_kernels.prefill_scores.api`; compiled for v4 to v6e, interpreted, never run on a chip."""
    (b, h, g, n, _), c = q.shape, k.shape[2]
    size, width = (min(BLOCK, -(-x // LANES) * LANES) for x in (n, c))
    tiles = Tiles(n, c, size, width, spec.window, n if own is None else own.of)
    noisy = scores and (noise is not None or tau != 1)
    blocks = tiles.padded(q, k, v, query_position, key_position, noise if noisy else None)
    if spec.slopes is not None:
        slopes = spec.slopes.astype(jnp.float32).reshape(1, -1, 1, 1)
        blocks["slope"] = jnp.broadcast_to(slopes, (1, h * g, 1, LANES))
    bounds = () if own is None else (tiles.bounds_of(own),)
    numbers: dict[str, Any] = dict(bounds=bounds, tiles=tiles, spec=spec, tau=tau, noisy=noisy, interpret=interpret)
    out, lse, noisy_lse = _attend(blocks, **numbers)
    sums = None
    if scores:
        del blocks["v"]
        blocks |= {"lse": noisy_lse, "weight": tiles.weights(weights, b)}
        sums = _collect(blocks, **numbers)[..., :c]
    return PromptAttention(out.reshape(b, h, g, *out.shape[2:])[..., :n, :], lse.reshape(b, h, g, -1)[..., :n], sums)


def _attend(
    blocks: dict[str, Array],
    *,
    bounds: tuple[Int[Array, "3 m"], ...],
    tiles: Tiles,
    spec: AttentionSpec,
    tau: float,
    noisy: bool,
    interpret: Any,
) -> tuple[Array, Array, Array]:
    """Output, log-sum-exp [b, query heads, 1, n], and that of the second softmax (or the same)."""
    (b, heads, n, _), e = blocks["q"].shape, blocks["v"].shape[3]

    def kernel(*refs: Any) -> None:
        known, refs = _bound(tiles, refs[: len(bounds)]), refs[len(bounds) :]
        ref = dict(zip(blocks, refs, strict=False))
        out_ref, *rest = refs[len(blocks) :]
        lse_refs, (sum_ref, *running) = rest[: 1 + noisy], rest[1 + noisy :]
        i, j = pl.program_id(2), pl.program_id(3)

        @pl.when(j == 0)
        def _() -> None:
            for at in (sum_ref, *running[1::2]):
                at[...] = jnp.zeros(at.shape, jnp.float32)
            for at in running[::2]:  # half of the lowest: exp(lowest - half) is 0 also where nothing has been seen
                at[...] = jnp.full(at.shape, LOWEST / 2, jnp.float32)

        @pl.when(known.seen(i, j))
        def _() -> None:
            x, tempered = _logits(ref, spec, tau, noisy)
            p, shrink = _add(x, *running[:2])
            v = ref["v"][0, 0]
            sum_ref[...] = sum_ref[...] * shrink + _dot(v, p.astype(v.dtype), (0, 0))
            if noisy:
                _add(tempered, *running[2:])

        @pl.when(j == tiles.keys - 1)
        def _() -> None:
            out_ref[0, 0] = (sum_ref[...] / _safe(running[1][...])).T
            for at, highest, total in zip(lse_refs, running[::2], running[1::2], strict=True):
                lse = highest[...] + jnp.log(_safe(total[...]))
                at[0, 0] = jnp.where(total[...] > 0, lse, -jnp.inf)

    specs = _specs(blocks, tiles, 4, lambda known, r, m, i, j: (r, m, i, known.of_keys(i, j)))
    row, one_lse = pltpu.VMEM((1, tiles.size), jnp.float32), jax.ShapeDtypeStruct((b, heads, 1, n), jnp.float32)
    out_spec = pl.BlockSpec((1, 1, tiles.size, e), lambda r, m, i, j, *_: (r, m, i, 0))
    lse_spec = pl.BlockSpec((1, 1, 1, tiles.size), lambda r, m, i, j, *_: (r, m, 0, i))
    out, *lse = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(bounds),
            grid=(b, heads, tiles.queries, tiles.keys),
            in_specs=specs,
            out_specs=[out_spec, *[lse_spec] * (1 + noisy)],
            scratch_shapes=[pltpu.VMEM((e, tiles.size), jnp.float32), *[row] * (4 if noisy else 2)],
        ),
        out_shape=[jax.ShapeDtypeStruct((b, heads, n, e), jnp.float32), *[one_lse] * (1 + noisy)],
        compiler_params=_in_order(3, 1),
        interpret=interpret,
        name="prefill_attend",
    )(*bounds, *blocks.values())
    return out, lse[0], lse[-1]


def _collect(
    blocks: dict[str, Array],
    *,
    bounds: tuple[Int[Array, "3 m"], ...],
    tiles: Tiles,
    spec: AttentionSpec,
    tau: float,
    noisy: bool,
    interpret: Any,
) -> Array:
    """Column sums [b, heads, rows of weights, c]."""
    b, h, c, _ = blocks["k"].shape
    g, rows = blocks["q"].shape[1] // h, blocks["weight"].shape[2]

    def kernel(*refs: Any) -> None:
        known, refs = _bound(tiles, refs[: len(bounds)]), refs[len(bounds) :]
        ref = dict(zip(blocks, refs, strict=False))
        out_ref, sum_ref = refs[len(blocks) :]
        j, member, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)

        @pl.when((member == 0) & (i == 0))
        def _() -> None:
            sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

        weight = ref["weight"][0, 0]

        @pl.when(known.seen(i, j) & (jnp.max(jnp.abs(weight)) > 0))
        def _() -> None:
            lse = ref["lse"][0, 0]
            x = _logits(ref, spec, tau, noisy)[1]
            p = jnp.exp(x - jnp.where(lse == -jnp.inf, 0.0, lse))
            for m in range(rows):
                counted = p * weight[m : m + 1]
                parts = [counted[:, at : at + LANES] for at in range(0, tiles.size, LANES)]
                sum_ref[m] += functools.reduce(jnp.add, parts)

        @pl.when((member == g - 1) & (i == tiles.queries - 1))
        def _() -> None:
            for m in range(rows):
                out_ref[0, 0, m : m + 1] = jnp.sum(sum_ref[m].T, axis=0, keepdims=True)

    def wanted(known: Tiles, r: Any, m: Any, j: Any, member: Any, i: Any) -> tuple[Any, ...]:
        return r, m * g + member, known.of_queries(i, j), j

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(bounds),
            grid=(b, h, tiles.keys, g, tiles.queries),
            in_specs=_specs(blocks, tiles, 5, wanted),
            out_specs=pl.BlockSpec((1, 1, rows, tiles.width), lambda r, m, j, member, i, *_: (r, m, 0, j)),
            scratch_shapes=[pltpu.VMEM((rows, tiles.width, LANES), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((b, h, rows, c), jnp.float32),
        compiler_params=_in_order(3, 2),
        interpret=interpret,
        name="prefill_column_sums",
    )(*bounds, *blocks.values())


def _bound(tiles: Tiles, bounds: tuple[Any, ...]) -> Tiles:
    return dataclasses.replace(tiles, bounds=bounds[0]) if bounds else tiles


def _specs(blocks: dict[str, Array], tiles: Tiles, steps: int, at: Callable[..., Any]) -> list[pl.BlockSpec]:
    # `at` says which row, query head, block of queries and block of keys a step of a grid of so many dimensions wants.
    heads = blocks["q"].shape[1]

    def spec(name: str, array: Array) -> pl.BlockSpec:
        of_keys = int(name not in ("q", "query", "lse", "weight"))
        length = (tiles.size, tiles.width)[of_keys]
        share = heads // array.shape[1]  # query heads that share this array's

        def index(*step: Any) -> tuple[Any, ...]:
            r, m, *block = at(_bound(tiles, step[steps:]), *step[:steps])
            if name == "slope":
                return 0, m, 0, 0
            along = (block[of_keys], 0) if name in "qkv" else (0, block[of_keys])
            return r, m // share, *along

        if name == "slope":
            return pl.BlockSpec((1, 1, 1, LANES), index)
        shape = (length, array.shape[3]) if name in "qkv" else (array.shape[2], length)
        return pl.BlockSpec((1, 1, *shape), index)

    return [spec(name, array) for name, array in blocks.items()]


def _in_order(parallel: int, arbitrary: int) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(dimension_semantics=("parallel",) * parallel + ("arbitrary",) * arbitrary)


def _logits(ref: dict[str, Any], spec: AttentionSpec, tau: float, noisy: bool) -> tuple[Array, Array]:
    """Masked logits [keys, queries], and with noise at temperature tau (or the same)."""
    q, k = ref["q"][0, 0], ref["k"][0, 0]
    query, key = ref["query"][0, 0], _column(ref["key"][0, 0])
    visible = (key >= 0) & (key <= query)
    if spec.window is not None:
        visible &= key > query - spec.window
    x = spec.capped(_dot(k, q, (1, 1)))
    if "slope" in ref:
        x += ref["slope"][0, 0][:, :1] * (key - query).astype(jnp.float32)
    x = jnp.where(visible, x, LOWEST)
    if not noisy:
        return x, x
    drawn = x + _column(ref["noise"][0, 0]) if "noise" in ref else x
    return x, jnp.where(visible, drawn / tau, LOWEST)


def _add(x: Array, highest_ref: Any, total_ref: Any) -> tuple[Array, Array]:
    """One more block of an online softmax: its weights, and by what earlier ones shrink."""
    highest = jnp.maximum(highest_ref[...], jnp.max(x, axis=0, keepdims=True))
    p, shrink = jnp.exp(x - highest), jnp.exp(highest_ref[...] - highest)
    highest_ref[...] = highest
    total_ref[...] = total_ref[...] * shrink + jnp.sum(p, axis=0, keepdims=True)
    return p, shrink


def _dot(a: Array, b: Array, over: tuple[int, int]) -> Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    contracted = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(a, b, contracted, precision=precision, preferred_element_type=jnp.float32)


def _column(row: Array) -> Array:
    """[1, n] to [n, 1], through a square of lanes."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def _safe(total: Array) -> Array:
    return jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
