"""Prompt attention and its column sums in plain XLA: a triangle of blocks with a running maximum."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Blocks(NamedTuple):
    """How a prompt is cut: whatever is on the way exists for one block of queries and one of keys at a time."""

    rows: int
    """Query rows over all heads, about; their weights are held until their sums are known: linear memory."""
    queries: int
    """Queries of a block, at most: the triangle's steps."""
    keys: int
    """Keys of a block, at most."""


CPU = Blocks(2048, 256, 256)
"""What stays near the cores, measured."""

ACCELERATOR = Blocks(8192, 512, 2048)
"""Fewer and larger steps, as each costs the same time to start; never measured on a chip."""


class PromptAttention(NamedTuple):
    """Attention of a prompt's queries, and what each key received; float32, or float64 for float64."""

    out: Float[Array, "b h g n d"]
    lse: Float[Array, "b h g n"]
    """Logarithm of each query's sum of exponentials; -inf where a query saw nothing, its output then is 0."""
    scores: Float[Array, "b h g c"] | None
    """Column sums of the probabilities, weighted per query; None if they were not asked for."""


class _Running(NamedTuple):
    # Maximum and sum of the softmax so far, its unnormalised output, and the same for the second softmax.
    highest: Array
    total: Array
    out: Array
    noisy_highest: Array
    noisy_total: Array


def prefill_scores(
    q: Float[Array, "b h g n d"],
    k: Float[Array, "b h c d"],
    v: Float[Array, "b h c d"],
    query_position: Int[Array, "b n"],
    key_position: Int[Array, "b #h c"],
    weights: Float[Array, "b #h n"] | None,
    noise: Float[Array, "b h c"] | None,
    slopes: Float[Array, "h g"] | None,
    *,
    tau: float,
    scores: bool,
    window: int | None,
    platform: str,
) -> PromptAttention:
    """See `pallas_kernels.prefill_scores.api`."""
    (b, h, g, n, d), c, dtype = q.shape, k.shape[2], jnp.promote_types(q.dtype, jnp.float32)
    most = CPU if platform == "cpu" else ACCELERATOR
    size = min(_power_below(max(32, most.rows // (b * h * g))), most.queries, _power_above(n))
    width = min(most.keys, _power_above(c))
    pad_n, pad_c = -n % size, -c % width
    if pad_n:
        q = jnp.pad(q, ((0, 0),) * 3 + ((0, pad_n), (0, 0)))
        query_position = jnp.pad(query_position, ((0, 0), (0, pad_n)), constant_values=-1)
        weights = None if weights is None else jnp.pad(weights, ((0, 0), (0, 0), (0, pad_n)))
    if pad_c:
        k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, pad_c), (0, 0))) for x in (k, v))
        key_position = jnp.pad(key_position, ((0, 0), (0, 0), (0, pad_c)), constant_values=-1)
        noise = None if noise is None else jnp.pad(noise, ((0, 0), (0, 0), (0, pad_c)))
    blocks, lowest = (c + pad_c) // width, jnp.finfo(dtype).min
    tempered = scores and tau != 1
    # At tau = 1 the noise is a factor per key, of the same exponentials: e^(x + zeta) = e^x e^zeta.
    factor = None
    if scores and not tempered and noise is not None:
        factor = jnp.exp(noise.astype(dtype) - noise.astype(dtype).max(-1, keepdims=True))
    rows, shape = (b, h, g, size), (b, h, g, n + pad_n)

    def read(i, carry):
        out, lse, sums, held, held_highest = carry
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=i * size, slice_size=size)
        queries, position = cut(q, axis=3) * (1 / math.sqrt(d)), cut(query_position, axis=1)
        weight = (position >= 0)[:, None].astype(dtype)
        weight = weight if weights is None else weight * cut(weights, axis=2).astype(dtype)

        # A block of queries sees no key after its last one, a window none before its first; padding sees none at all.
        last = jnp.minimum(-(-(c - n + (i + 1) * size) // width), blocks)
        last = jnp.where((position >= 0).any(), last, 0)
        first = jnp.maximum(i * size - window + 1, 0) // width if window is not None and c == n else 0

        def look(j, carry):
            seen, held, held_highest = carry
            take = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=j * width, slice_size=width, axis=2)
            x = jnp.einsum("bhgtd,bhsd->bhgts", queries, take(k), preferred_element_type=dtype)
            keys = take(key_position)[:, :, None]
            visible = (keys >= 0) & (keys <= position[:, None, :, None])
            if window is not None:
                visible &= keys > position[:, None, :, None] - window
            if slopes is not None:
                x += slopes.astype(dtype)[:, :, None, None] * (keys - position[:, None, :, None])[:, :, None]
            x = jnp.where(visible[:, :, None], x, lowest)
            highest = jnp.maximum(seen.highest, x.max(-1))
            p, shrink = jnp.exp(x - highest[..., None]), jnp.exp(seen.highest - highest)
            share = jnp.einsum("bhgts,bhsd->bhgtd", p.astype(v.dtype), take(v), preferred_element_type=dtype)
            after = seen._replace(
                highest=highest,
                total=seen.total * shrink + p.sum(-1),
                out=seen.out * shrink[..., None] + share,
            )
            if factor is not None:
                mass = jnp.einsum("bhgts,bhs->bhgt", p, take(factor))
                after = after._replace(noisy_total=seen.noisy_total * shrink + mass)
            if tempered:
                drawn = 0.0 if noise is None else take(noise).astype(dtype)[:, :, None, None]
                y = jnp.where(visible[:, :, None], (x + drawn) / tau, lowest)
                highest = jnp.maximum(seen.noisy_highest, y.max(-1))
                p, shrink = jnp.exp(y - highest[..., None]), jnp.exp(seen.noisy_highest - highest)
                after = after._replace(noisy_highest=highest, noisy_total=seen.noisy_total * shrink + p.sum(-1))
            if scores:
                held = jax.lax.dynamic_update_index_in_dim(held, p, j, 0)
                held_highest = jax.lax.dynamic_update_index_in_dim(held_highest, highest, j, 0)
            return after, held, held_highest

        # Half of the lowest number: exp(lowest - highest) is 0 also where nothing has been seen.
        start, nothing = jnp.full(rows, lowest / 2, dtype), jnp.zeros(rows, dtype)
        begin = _Running(start, nothing, jnp.zeros((*rows, d), dtype), start, nothing)
        seen, held, held_highest = jax.lax.fori_loop(first, last, look, (begin, held, held_highest))

        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=i * size, axis=3)
        out = put(out, seen.out / _safe(seen.total)[..., None])
        lse = put(lse, jnp.where(seen.total > 0, seen.highest + jnp.log(_safe(seen.total)), -jnp.inf))
        if not scores:
            return out, lse, sums, held, held_highest
        highest = seen.noisy_highest if tempered else seen.highest
        total = seen.noisy_total if tempered or factor is not None else seen.total
        share = weight[:, :, None] / _safe(total)

        def add(j, sums):
            # What was held is relative to the maximum at that time.
            added = jnp.einsum("bhgts,bhgt->bhgs", held[j], jnp.exp(held_highest[j] - highest) * share)
            old = jax.lax.dynamic_slice_in_dim(sums, j * width, width, axis=3)
            return jax.lax.dynamic_update_slice_in_dim(sums, old + added, j * width, axis=3)

        weighed = jnp.where((weight != 0).any(), last, first)
        return out, lse, jax.lax.fori_loop(first, weighed, add, sums), held, held_highest

    empty = (
        jnp.zeros((*shape, d), dtype),
        jnp.full(shape, -jnp.inf, dtype),
        jnp.zeros((b, h, g, c + pad_c) if scores else (), dtype),
        jnp.zeros((blocks, *rows, width) if scores else (), dtype),
        jnp.zeros((blocks, *rows) if scores else (), dtype),
    )
    out, lse, sums, *_ = jax.lax.fori_loop(0, (n + pad_n) // size, read, empty)
    if factor is not None:
        sums *= factor[:, :, None]
    return PromptAttention(out[..., :n, :], lse[..., :n], sums[..., :c] if scores else None)


def _safe(total: Array) -> Array:
    return jnp.maximum(total, jnp.finfo(total.dtype).tiny)


def _power_below(x: int) -> int:
    return 1 << (x.bit_length() - 1)


def _power_above(x: int) -> int:
    return 1 << (x - 1).bit_length()
