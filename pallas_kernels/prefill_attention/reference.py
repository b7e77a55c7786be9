"""Prompt attention and its column sums in plain XLA: a triangle of blocks with a running maximum."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.attention import (
    add_logits,
    attend,
    join_queries,
    log_sum,
    noisy_numerators,
    pad_to,
    positive,
    power_below,
    split_queries,
    wide,
)
from pallas_kernels.common import padded
from pallas_kernels.op import Options
from pallas_kernels.operands import Operand, SplitKV, cut, values
from pallas_kernels.prefill_attention.api import PrefillAttention, PromptAttention


class Blocks(NamedTuple):
    """Block sizes of a prompt: intermediates exist for one block of queries and one of keys at a time."""

    rows: int
    """Approximate query rows over all heads; their weights are held until their sums are known, in linear memory."""
    queries: int
    """Maximum queries of a block: the triangle's steps."""
    keys: int
    """Maximum keys of a block."""


CPU = Blocks(4096, 256, 256)
"""Sizes that stay in the cores' caches, measured."""

CPU_LONG = Blocks(8192, 512, 512)
"""Sizes for long texts without held weights: products so large that two cores share them well, measured."""

ACCELERATOR = Blocks(8192, 512, 2048)
"""Fewer and larger steps, as each step takes the same time to start; never measured on a chip."""


LOGITS = 1 << 22
"""Approximate number of logits in a block of the differentiable form; all of them exist at one time."""


class _Running(NamedTuple):
    # Running maximum and sum of the softmax, its unnormalized output, and maximum and sum of the second softmax.
    highest: Array
    total: Array
    out: Array
    noisy_highest: Array
    noisy_total: Array


class _Part(NamedTuple):
    # Keys and values of one array each; the first is slot `start`.
    k: Operand
    v: Operand
    start: int
    slots: int
    width: int

    @property
    def blocks(self) -> int:
        return -(-self.slots // self.width)

    def begin(self, j: Any) -> Any:
        # The last block may begin early and overlap the one before it, so whole blocks need no padded copy.
        return jnp.minimum(j * self.width, self.slots - self.width)

    def visible_blocks(self, begin: Any, end: Any, before: int, window: int | None) -> tuple[Any, Any]:
        # Queries of tokens from `begin` up to `end` attend to no key after their own or before their window. The first
        # `before` slots are in no order.
        ahead = self.start - before
        last = jnp.clip(-(-(end - ahead) // self.width), 0, self.blocks)
        ordered = window is not None and ahead >= 0
        first = jnp.maximum(begin - ahead - window + 1, 0) // self.width if ordered else 0
        return first, last

    def ages(self, key_position: Int[Array, "b #h c"]) -> tuple[Array, Array]:
        # The oldest and the newest position of each block that overlaps no other.
        count = self.slots // self.width
        blocks = key_position[:, :, self.start : self.start + count * self.width]
        blocks = blocks.reshape(*blocks.shape[:2], count, self.width)
        return blocks.min((0, 1, 3)), blocks.max((0, 1, 3))


def _hiding(ages: tuple[Array, Array], query_position: Int[Array, "b t"], window: int | None, first: Any) -> Any:
    # The first block from `first` on with a key that is masked for some query.
    oldest, newest = ages
    hides = (oldest < 0) | (newest > query_position.min())
    if window is not None:
        hides |= oldest <= query_position.max() - window
    block = jnp.arange(len(oldest))
    return jnp.where(hides & (block >= first), block, len(oldest)).min(initial=len(oldest))


def prefill_attention(x: PrefillAttention, options: Options) -> PromptAttention:
    (b, h, g, n, _), c, dtype = x.q.shape, x.k.shape[2], wide(x.q.dtype)
    sizes = ACCELERATOR if options.platform != "cpu" else CPU if x.scores or n < CPU_LONG.queries else CPU_LONG
    heads = b * h * g, h * g
    shortest = 1 << (n - 1).bit_length()  # a power of two
    size, row_size = (min(power_below(max(32, sizes.rows // count)), sizes.queries, shortest) for count in heads)
    if options.platform == "cpu" and size < row_size:
        # Row by row, blocks of queries are larger, so cores read the keys less often than in small blocks of all rows.
        names = "q", "k", "v", "query_position", "key_position", "weights", "noise", "places"

        def of_row(i: Any, y: Any) -> Any:
            return SplitKV(of_row(i, y.old), of_row(i, y.new)) if isinstance(y, SplitKV) else cut(y, i, 1, 0)

        def read_row(i: Any) -> PromptAttention:
            row: dict[str, Any] = {name: of_row(i, getattr(x, name)) for name in names}
            return jax.tree.map(lambda y: y[0], prefill_attention(dataclasses.replace(x, **row), options))

        return jax.lax.map(read_row, jnp.arange(b))
    (q, k, v, spec), (query_position, key_position) = (x.q, x.k, x.v, x.spec), (x.query_position, x.key_position)
    weights, noise, tau, scores = x.weights, x.noise, x.tau, x.scores
    pad, of = -n % size, x.tokens
    tokens = None if x.query_tokens is None else jnp.pad(x.query_tokens.token, (0, pad), mode="edge")
    query_place, key_place = (query_position[:, None], key_position) if x.places is None else x.places
    if pad:
        q, query_position = pad_to(q, 3, n + pad), pad_to(query_position, 1, n + pad, -1)
        query_place = pad_to(query_place, 2, n + pad)
        weights = None if weights is None else pad_to(weights, 3, n + pad)
    parts, lowest = _parts(k, v, sizes.keys), jnp.finfo(dtype).min
    ages = [part.ages(key_position) for part in parts]
    if math.frexp(spec.scale)[0] == 0.5:
        # A power of two rounds nothing, so one pass over queries replaces one over every block of products.
        q, spec = q * jnp.asarray(spec.scale, q.dtype), dataclasses.replace(spec, scale=1.0)
    if spec.slopes is not None:
        spec = dataclasses.replace(spec, slopes=spec.slopes.astype(dtype))
    second = scores and tau != 1  # whether the sums are of a second softmax
    # At tau = 1 the noise is a factor per key on the same exponentials: e^(x + zeta) = e^x e^zeta.
    factor = None
    if scores and not second and noise is not None:
        factor = jnp.exp(noise.astype(dtype) - noise.astype(dtype).max(-1, keepdims=True))
    rows, shape, m = (b, h, g, size), (b, h, g, n + pad), 1 if weights is None else weights.shape[2]

    def read(i: Any, carry: Any) -> Any:
        out, lse, sums, exponentials = carry
        of_queries = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=i * size, slice_size=size)
        queries, position = of_queries(q, axis=3), of_queries(query_position, axis=1)
        weight = (position >= 0)[:, None, None].astype(dtype)
        weight = weight if weights is None else weight * of_queries(weights, axis=3).astype(dtype)
        counted = (weight != 0).any()

        def add_keys(part: _Part, masked: bool, j: Any, carry: Any) -> Any:
            state, exponentials = carry
            at = part.begin(j)
            take = functools.partial(
                jax.lax.dynamic_slice_in_dim, start_index=part.start + at, slice_size=part.width, axis=2
            )
            block_k, block_v = (values(cut(x, at, part.width, 2), q.dtype) for x in (part.k, part.v))
            x = spec.capped(jnp.einsum("bhgtd,bhsd->bhgts", queries, block_k, preferred_element_type=dtype))
            visible = spec.mask(position, take(key_position))[:, :, None] if masked else True
            if masked and part.slots % part.width:
                visible &= at + jnp.arange(part.width) >= j * part.width
            bias = spec.bias(of_queries(query_place, axis=2), take(key_place))
            x = jnp.where(visible, x if bias is None else x + bias, lowest)
            p, shrink, highest, total = add_logits(state.highest, state.total, x)
            share = jnp.einsum("bhgts,bhse->bhgte", p.astype(q.dtype), block_v, preferred_element_type=dtype)
            after = state._replace(highest=highest, total=total, out=state.out * shrink[..., None] + share)
            if factor is not None:
                mass = jnp.einsum("bhgts,bhs->bhgt", p, take(factor))
                after = after._replace(noisy_total=state.noisy_total * shrink + mass)
            if second:
                zeta = 0.0 if noise is None else take(noise).astype(dtype)[:, :, None, None]
                y = jnp.where(visible, (x + zeta) / tau, lowest)
                p, _, highest, total = add_logits(state.noisy_highest, state.noisy_total, y)
                after = after._replace(noisy_highest=highest, noisy_total=total)
            if scores:
                hold = functools.partial(jax.lax.dynamic_update_index_in_dim, index=j, axis=0)
                exponentials = jax.lax.cond(
                    counted, lambda: tuple(map(hold, exponentials, (p, highest))), lambda: exponentials
                )
            return after, exponentials

        # Half of the lowest number: exp(lowest - highest) is 0 also before any key is visible.
        start, nothing = jnp.full(rows, lowest / 2, dtype), jnp.zeros(rows, dtype)
        state = _Running(start, nothing, jnp.zeros((*rows, v.shape[3]), dtype), start, nothing)
        begin, end = i * size, (i + 1) * size
        if tokens is not None:
            begin, end = tokens[begin], tokens[end - 1] + 1
        ranges = []
        for at, part in enumerate(parts):
            first, last = part.visible_blocks(begin, end, c - of, spec.window)
            last = jnp.where((position >= 0).any(), last, 0)
            # Most blocks mask nothing, and a mask takes another pass over the products.
            hiding = jnp.clip(_hiding(ages[at], position, spec.window, first), first, last)
            unmasked = jax.lax.fori_loop(
                first, hiding, functools.partial(add_keys, part, False), (state, exponentials[at])
            )
            state, part_exponentials = jax.lax.fori_loop(
                hiding, last, functools.partial(add_keys, part, True), unmasked
            )
            exponentials = (*exponentials[:at], part_exponentials, *exponentials[at + 1 :])
            ranges.append((first, last))

        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=i * size, axis=3)
        out = put(out, state.out / positive(state.total)[..., None])
        lse = put(lse, log_sum(state.highest, state.total))
        if not scores:
            return out, lse, sums, exponentials
        highest = state.noisy_highest if second else state.highest
        total = state.noisy_total if second or factor is not None else state.total
        share = weight[:, :, :, None] / positive(total)[:, :, None]

        def add(part: _Part, exponentials: tuple[Array, Array], j: Any, sums: Array) -> Array:
            # Held exponentials are relative to the maximum at their time.
            p, highest_then = (x[j] for x in exponentials)
            shares = share * jnp.exp(highest_then - highest)[:, :, None]
            added = jnp.einsum("bhmgt,bhgts->bhms", shares, p)
            at = part.start + part.begin(j)
            old = jax.lax.dynamic_slice_in_dim(sums, at, part.width, axis=3)
            return jax.lax.dynamic_update_slice_in_dim(sums, old + added, at, axis=3)

        for part, part_exponentials, (first, last) in zip(parts, exponentials, ranges, strict=True):
            last = jnp.where(counted, last, first)
            sums = jax.lax.fori_loop(first, last, functools.partial(add, part, part_exponentials), sums)
        return out, lse, sums, exponentials

    empty = (
        jnp.zeros((*shape, v.shape[3]), dtype),
        jnp.full(shape, -jnp.inf, dtype),
        jnp.zeros((b, h, m, c) if scores else (), dtype),
        tuple(
            (jnp.zeros((part.blocks, *rows, part.width), dtype), jnp.zeros((part.blocks, *rows), dtype))
            if scores
            else ()
            for part in parts
        ),
    )
    out, lse, sums, _ = jax.lax.fori_loop(0, (n + pad) // size, read, empty)
    if factor is not None:
        sums *= factor[:, :, None]
    return PromptAttention(out[..., :n, :], lse[..., :n], sums if scores else None)


def _parts(k: Operand | SplitKV, v: Operand | SplitKV, max_width: int) -> list[_Part]:
    pairs = zip(*((x.old, x.new) if isinstance(x, SplitKV) else (x,) for x in (k, v)), strict=True)
    parts, start = [], 0
    for part_k, part_v in pairs:
        slots = part_k.shape[2]
        if slots:
            parts.append(_Part(part_k, part_v, start, slots, min(max_width, slots)))
        start += slots
    return parts


def differentiable(x: PrefillAttention) -> PromptAttention:
    """Return what JAX can differentiate: blocks of queries over all keys, recomputed in the backward pass.

    The other forms have loops whose bounds depend on the prompt, which JAX cannot differentiate in reverse mode.
    """
    (b, h, g, n, _), c, dtype = x.q.shape, x.k.shape[2], wide(x.q.dtype)
    query_position, key_position, noise = x.query_position, x.key_position, x.noise
    keys, vals = (values(y, x.q.dtype) for y in (x.k, x.v))
    query_place, key_place = (query_position[:, None], key_position) if x.places is None else x.places
    counted = (query_position >= 0)[:, None, None].astype(dtype)
    counted = counted if x.weights is None else counted * x.weights.astype(dtype)
    size = max(1, min(n, LOGITS // (b * h * g * c)))

    @jax.checkpoint
    def read(block: tuple[Array, ...]) -> PromptAttention:
        queries, position, place, count = block
        mask, bias = x.spec.mask(position, key_position), x.spec.bias(place, key_place)
        partial, probs = attend(queries, keys, vals, mask, x.spec, bias)
        if not x.scores:
            return PromptAttention(*partial, None)
        if x.tau != 1 or noise is not None:
            probs = noisy_numerators(probs, None if noise is None else noise.astype(dtype)[:, :, None, None], x.tau)
            total = probs.sum(-1, keepdims=True)
            probs = probs / jnp.where(total > 0, total, 1)
        count = jnp.broadcast_to(count, (b, h, *count.shape[2:]))
        return PromptAttention(*partial, jnp.einsum("bhmt,bhgts->bhms", count, probs))

    arrays = ((x.q, 3), (query_position, 1), (query_place, 2), (counted, 3))
    blocks = [split_queries(pad_to(y, axis, padded(y.shape[axis], size)), axis, size) for y, axis in arrays]
    # Padding of the last block attends to nothing.
    blocks[1] = jnp.where((jnp.arange(blocks[1].shape[0] * size) < n).reshape(-1, 1, size), blocks[1], -1)
    blocks[3] = jnp.where((blocks[1] >= 0)[:, :, None, None], blocks[3], 0)
    attended = jax.lax.map(read, tuple(blocks))
    out, lse = (join_queries(y, 3)[:, :, :, :n] for y in attended[:2])
    return PromptAttention(out, lse, attended.scores.sum(0) if x.scores else None)
