"""Prompt attention and its column sums for GPU through Pallas's Triton lowering, in the two passes of the TPU form.

Each program holds one block, of queries in the first pass and of keys in the second. It loops over the other side's
blocks that are visible to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.attention import AttentionSpec, add_logits, log_sum, pad_to, positive
from pallas_kernels.blocks import output_block, run
from pallas_kernels.common import padded
from pallas_kernels.decode_attention.kernel_parts import LOWEST, visible_slots
from pallas_kernels.decode_attention.pallas_gpu import PARAMS, multiplication
from pallas_kernels.decode_attention.splits import ROWS, channels
from pallas_kernels.prefill_attention.api import PrefillAttention, PromptAttention
from pallas_kernels.prefill_attention.tiles import Tiles, row


def prefill_attention(x: PrefillAttention, *, interpret: Any) -> PromptAttention:
    (b, h, g, n, d), c = x.q.shape, x.k.shape[2]
    tiles = Tiles(n, c, *_sizes(max(d, x.v.shape[3]), x.q.dtype), x.spec.window, x.tokens)
    noisy = x.scores and (x.noise is not None or x.tau != 1)
    blocks = tiles.padded(x)
    if noisy and x.noise is not None:
        blocks["noise"] = row(x.noise.astype(jnp.float32), tiles.keys * tiles.width, 0)
    if x.spec.slopes is not None:
        blocks["slope"] = x.spec.slopes.astype(jnp.float32).reshape(1, -1, 1, 1)
    if x.query_tokens is not None:
        blocks["ranges"] = tiles.ranges_of(x.query_tokens)
    numbers: dict[str, Any] = dict(tiles=tiles, spec=x.spec, tau=x.tau, noisy=noisy, interpret=interpret)
    out, lse, noisy_lse = _attend(blocks, **numbers)
    sums = None
    if x.scores:
        del blocks["v"]
        blocks |= {"lse": noisy_lse, "weight": tiles.weights(x.weights, b)}
        sums = _collect(blocks, **numbers)
        sums = sums.reshape(b, h, g, *sums.shape[2:]).sum(2)[..., :c]
    return PromptAttention(out.reshape(b, h, g, *out.shape[2:])[..., :n, :], lse.reshape(b, h, g, -1)[..., :n], sums)


def _attend(
    blocks: dict[str, Array], *, tiles: Tiles, spec: AttentionSpec, tau: float, noisy: bool, interpret: Any
) -> tuple[Array, Array, Array]:
    """Return output, log-sum-exp [b, query heads, n], and that of the second softmax (or the same)."""
    (b, heads, n, _), e = blocks["q"].shape, blocks["v"].shape[3]
    multiply = multiplication(interpret)

    def kernel(refs: Any, outputs: Any) -> None:
        i, division = pl.program_id(0), tiles.with_refs(refs)
        queries = pl.ds(0, tiles.size)

        def add_block(j: Any, carry: Any) -> Any:
            acc, running = carry
            keys = pl.ds(j * tiles.width, tiles.width)
            x, tempered = _logits(refs, queries, keys, spec, tau, noisy, multiply)
            p, shrink, *first = add_logits(running[0], running[1], x)
            v = refs["v"][keys]
            acc = acc * shrink[:, None] + multiply(p.astype(v.dtype), v)
            return acc, (*first, *(add_logits(running[2], running[3], tempered)[2:] if noisy else ()))

        nothing = jnp.zeros(tiles.size, jnp.float32)
        running = (jnp.full(tiles.size, LOWEST / 2, jnp.float32), nothing) * (2 if noisy else 1)
        start = (jnp.zeros((tiles.size, e), jnp.float32), running)
        acc, running = jax.lax.fori_loop(division.first(i), division.last(i) + 1, add_block, start)
        outputs["out"][...] = acc / positive(running[1])[:, None]
        for name, highest, total in zip(("lse", "noisy_lse"), running[::2], running[1::2], strict=False):
            outputs[name][...] = log_sum(highest, total)

    of_rows = pl.BlockSpec((None, None, None, tiles.size), lambda i, m, r: (r, m, 0, i))
    of_queries = pl.BlockSpec((None, None, tiles.size, e), lambda i, m, r: (r, m, i, 0))
    names = ("lse", "noisy_lse")[: 1 + noisy]
    outputs = {"out": output_block((b, heads, n, e), of_queries)}
    results = run(
        kernel,
        (tiles.inputs(blocks, lambda _, i, m, r: (r, m, i, i), looped="keys"),),
        outputs | {name: output_block((b, heads, 1, n), of_rows) for name in names},
        grid=(tiles.queries, heads, b),
        compiler_params=PARAMS,
        interpret=interpret,
        name="prefill_attend",
    )
    return results["out"], results["lse"], results[names[-1]]


def _collect(
    blocks: dict[str, Array], *, tiles: Tiles, spec: AttentionSpec, tau: float, noisy: bool, interpret: Any
) -> Array:
    """Return column sums [b, query heads, rows of weights, c]."""
    (b, heads, _, _), c, rows = blocks["q"].shape, blocks["k"].shape[2], blocks["weight"].shape[2]
    multiply, several = multiplication(interpret), rows > 1
    if several:  # a product sums them, which has at least 16 rows
        blocks = blocks | {"weight": pad_to(blocks["weight"], 2, padded(rows, ROWS))}
    weight_rows = blocks["weight"].shape[2]

    def kernel(refs: Any, out_ref: Any) -> None:
        j = pl.program_id(0)

        def add_block(i: Any, sums: Array) -> Array:
            queries = pl.ds(i * tiles.size, tiles.size)
            lse, keys = refs["lse"][0, queries], pl.ds(0, tiles.width)
            x = _logits(refs, queries, keys, spec, tau, noisy, multiply)[1]
            p = jnp.exp(x - jnp.where(lse == -jnp.inf, 0.0, lse)[:, None])
            if several:
                return sums + multiply(refs["weight"][:, queries], p)
            return sums + (p * refs["weight"][0, queries][:, None]).sum(0)

        start = jnp.zeros((weight_rows, tiles.width) if several else tiles.width, jnp.float32)
        sums = jax.lax.fori_loop(tiles.with_refs(refs).first_queries(j), tiles.queries, add_block, start)
        out_ref[...] = sums if several else sums[None, :]

    of_keys = pl.BlockSpec((None, None, weight_rows, tiles.width), lambda j, m, r: (r, m, 0, j))
    return run(
        kernel,
        (tiles.inputs(blocks, lambda _, j, m, r: (r, m, j, j), looped="queries"),),
        output_block((b, heads, weight_rows, c), of_keys),
        grid=(tiles.keys, heads, b),
        compiler_params=PARAMS,
        interpret=interpret,
        name="prefill_column_sums",
    )[:, :, :rows]


def _sizes(width: int, dtype: DTypeLike) -> tuple[int, int]:
    """Return the queries and keys of a block that four warps hold in registers, for keys or values of this width."""
    if dtype == jnp.float32:
        return (32, 32) if width <= 128 else (16, 16)
    return (64, 64) if width <= 128 else (64, 32)


def _logits(
    refs: Any,
    queries: Any,
    keys: Any,
    spec: AttentionSpec,
    tau: float,
    noisy: bool,
    multiply: Callable[[Array, Array], Array],
) -> tuple[Array, Array]:
    """Return masked logits [queries, keys], and those with noise at temperature tau (or the same)."""
    query, key = refs["query"][0, queries], refs["key"][0, keys][None, :]
    visible = visible_slots(key, query[:, None], spec.window)
    pieces = channels(refs["q"].shape[-1], refs["q"].dtype)
    products = (multiply(refs["q"][queries, piece], refs["k"][keys, piece].T) for piece in pieces)
    x = spec.capped(functools.reduce(jnp.add, products))
    if "slope" in refs:
        x += refs["slope"][0, 0] * (key - query[:, None]).astype(jnp.float32)
    x = jnp.where(visible, x, LOWEST)
    if not noisy:
        return x, x
    with_noise = x + refs["noise"][0, keys][None, :] if "noise" in refs else x
    return x, jnp.where(visible, with_noise / tau, LOWEST)
