"""Attention statistics that kernels do not compute: recomputed from logits, a few queries at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.stats import normalised, reduced, seen_slots
from kvjax.policies.codec import Codec, Operands
from kvjax.policies.residual import Selection
from kvjax.policies.stats import AttentionProbs, LocalAttention, Peak, ReplayedQueries, Seen
from kvjax.types import LayerTokens, View, wide
from pallas_kernels.attention import Partial, join_queries, query_block, split_queries
from pallas_kernels.operands import Operand, SplitKV, values


def _probabilities(
    operands: Operands,
    view: View,
    new: LayerTokens,
    q: Float[Array, "b h g t d"],
    lse: Float[Array, "b h g t"],
    position: Int[Array, "b t"],
    place: Int[Array, "b h t"] | None,
) -> Float[Array, "b h g t c"]:
    spec = new.config.spec
    keys = values(operands.k, q.dtype)
    x = spec.capped(jnp.einsum("bhgtd,bhcd->bhgtc", q, keys, preferred_element_type=lse.dtype))
    in_text = (position[:, None], view.position)
    bias = spec.bias(*(in_text if place is None or operands.places is None else (place, operands.places[1])))
    x = x if bias is None else x + bias.astype(x.dtype)
    mask = spec.mask(position, view.position)[:, :, None]
    return jnp.where(mask, jnp.exp(x - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None]), 0.0)


def _blocks(operands: Operands, new: LayerTokens, lse: Float[Array, "b h g t"]) -> tuple[int, Any]:
    # Returns the block size, and (q, lse, position, place) split into blocks of queries.
    size = query_block(new.position.shape[1], new.q.shape[0])
    place = None if operands.places is None else split_queries(operands.places[0], -1, size)
    parts = (split_queries(operands.q, -2, size), split_queries(lse, -1, size), split_queries(new.position, -1, size))
    return size, (*parts, place)


def by_blocks(
    operands: Operands, view: View, new: LayerTokens, requests: Sequence[Any], lse: Float[Array, "b h g t"]
) -> list[Float[Array, "b h *g c"]]:
    """Compute statistics that kernels do not, by recomputing logits one block of queries at a time."""
    size, blocks = _blocks(operands, new, lse)
    ones = jnp.ones((new.q.shape[0], 1, new.position.shape[1]), lse.dtype)
    leaves, tree = jax.tree.flatten(
        [request.replace(weights=ones) if request.weights is None else request for request in requests]
    )
    # Arrays have an entry for each query in their last axis; the others are numbers.
    of_queries = [split_queries(leaf, -1, size) if jnp.ndim(leaf) else None for leaf in leaves]

    def add(sums: list[Array], block: Any) -> tuple[list[Array], None]:
        (q, lse, position, place), of_queries = block
        weighed = tree.unflatten(x if part is None else part for x, part in zip(leaves, of_queries, strict=True))
        part = new.replace(position=position)

        def add_block() -> list[Array]:
            probs = _probabilities(operands, view, new, q, lse, position, place)
            return [
                (jnp.maximum if isinstance(request, Peak) else jnp.add)(
                    total, reduced(request, probs, operands.v, view.position, part)
                )
                for total, request in zip(sums, weighed, strict=True)
            ]

        # Most queries of a prompt may have weight 0: skip blocks of such queries.
        counts = jnp.stack([(jnp.abs(request.weights) > 0).any() for request in weighed]).any()
        return jax.lax.cond(counts, add_block, lambda: sums), None

    none = jnp.zeros(view.position.shape, lse.dtype)
    of_heads = jnp.zeros((*lse.shape[:3], view.capacity), lse.dtype)
    zeros = [of_heads if isinstance(request, Peak) else none for request in requests]
    return jax.lax.scan(add, zeros, (blocks, of_queries))[0]


def replayed_stats(
    codec: Codec, operands: Operands, view: View, new: LayerTokens, request: ReplayedQueries
) -> Float[Array, "b h c"]:
    """Sum the attention that replayed queries give to each slot, a few queries at a time."""
    spec, kind = new.config.spec, wide(request.raw_q.dtype)
    _, _, count, groups, width = request.raw_q.shape
    # Blocks limit the logits to about a sixteenth of the keys' size; logits of all queries would exceed the cache.
    size = math.gcd(count, 1 << max(0, (width // (16 * groups)).bit_length() - 1))
    keys = values(operands.k, request.raw_q.dtype)

    def add(index: Array, sums: Array) -> Array:
        def cut(leaf: Array, axis: int) -> Array:
            return jax.lax.dynamic_slice_in_dim(leaf, index * size, size, axis)

        position, weights = cut(request.position, 1), cut(request.weights, 2)
        q, place = codec.earlier(view, operands, new, jnp.moveaxis(cut(request.raw_q, 2), 3, 2), position)
        # Keys come first: otherwise XLA transposes and copies them in each iteration.
        x = jnp.einsum("bhcd,bhgad->bhcga", keys, q, preferred_element_type=kind)
        x = spec.capped(jnp.moveaxis(x, 2, 4))
        bias = spec.bias(place, view.position if operands.places is None else operands.places[1])
        x = x if bias is None else x + bias.astype(x.dtype)
        # Mask logits once: then the sums fuse with their operands, and little else is allocated.
        mask = spec.mask(position, view.position)
        mask = mask if request.newest is None else mask & (view.position <= request.newest[:, None, None])[:, :, None]
        x = x.max(2, keepdims=True) if request.group == "max" else x
        x = jnp.where(mask[:, :, None], x, jnp.finfo(kind).min)
        highest = jnp.maximum(new.spread.most_of_slots(x.max(-1, keepdims=True)), jnp.finfo(kind).min / 2)
        shares = jnp.exp(x - highest)
        total = new.spread.over_slots(shares.sum(-1, keepdims=True))
        share = normalised(weights.astype(kind)[:, :, None, :, None], total)
        return sums + jnp.einsum("bhgac,bhga->bhc", shares, share[..., 0])

    # A GPU waits for the host at each condition, so there is one for all blocks.
    none = jnp.zeros(view.position.shape, kind)
    return jax.lax.cond(
        (request.weights > 0).any(), lambda: jax.lax.fori_loop(0, count // size, add, none), lambda: none
    )


def newest_attention(
    operands: Operands, view: View, new: LayerTokens, request: AttentionProbs, lse: Float[Array, "b h g t"]
) -> Seen:
    count = min(request.newest, new.position.shape[1])
    index = new.counts[:, None] - count + jnp.arange(count)
    at = jnp.maximum(index, 0)
    position = jnp.where(index >= 0, jnp.take_along_axis(new.position, at, 1), -1)
    q = jnp.take_along_axis(operands.q, at[:, None, None, :, None], 3)
    place = None if operands.places is None else jnp.take_along_axis(operands.places[0], at[:, None], 2)
    probs = _probabilities(operands, view, new, q, jnp.take_along_axis(lse, at[:, None, None], 3), position, place)
    mask = new.config.spec.mask(position, view.position)
    return Seen(probs, position, mask.sum(-1), mask)


def select_by_blocks(
    operands: Operands, view: View, new: LayerTokens, selection: Selection, partial: Partial
) -> Partial:
    def select(_: None, block: Any) -> tuple[None, Partial]:
        q, lse, position, place = block
        probs = _probabilities(operands, view, new, q, lse, position, place)
        return None, narrowed(selection, probs, operands.v, view.position, new.replace(position=position), lse)

    blocks = jax.lax.scan(select, None, _blocks(operands, new, partial.lse)[1])[1]
    return Partial(join_queries(blocks.out, -2), join_queries(blocks.lse, -1))


def narrowed(
    selection: Selection,
    probs: Float[Array, "b h g t c"],
    v: Operand | SplitKV,
    position: Int[Array, "b h c"],
    new: LayerTokens,
    lse: Float[Array, "b h g t"],
) -> Partial:
    # Probabilities of slots that a query sees are above 0 here, however small.
    mask = seen_slots(position, new)[:, :, None]
    probs = jnp.where(mask, jnp.maximum(probs, jnp.finfo(probs.dtype).tiny), 0.0)
    picked = new.spread.own_slots(selection.pick(new.spread.all_slots(probs, -1), new), -1)
    if new.config.local:
        picked |= new.config.bounded_by_window(new.end)[:, None, None, None, None]
    weights = jnp.where(picked, probs, 0.0)
    mass = new.spread.over_slots(weights.sum(-1, keepdims=True))
    safe = jnp.where(mass > 0, mass, 1.0)
    out = jnp.einsum("bhgtc,bhcd->bhgtd", weights / safe, values(v, weights.dtype))
    return Partial(out, lse + jnp.log(safe)[..., 0])


def near_sums(new: LayerTokens, lse: Float[Array, "b h g t"], request: LocalAttention) -> Float[Array, "b h t"]:
    """Compute a requested `LocalAttention` in blocks along the diagonal."""
    (b, h, _, t, _), kind, spec = new.q.shape, lse.dtype, new.config.spec
    if request.width is None:
        x = spec.capped(jnp.einsum("bhgtd,bhtd->bhgt", new.q, new.k, preferred_element_type=kind))
        return jnp.where(new.position[:, None, None] >= 0, jnp.exp(x - lse), 0.0).sum(2)
    size = query_block(t, b)
    span = min(t, -(-request.most // size) * size + size)

    def add(sums: Array, queries: Any) -> tuple[Array, None]:
        q, lse, at, width, first = queries
        start = jnp.maximum(first + size - span, 0)
        keys = jax.lax.dynamic_slice_in_dim(new.k, start, span, axis=2)
        where = jax.lax.dynamic_slice_in_dim(new.position, start, span, axis=1)
        x = spec.capped(jnp.einsum("bhgtd,bhsd->bhgts", q, keys, preferred_element_type=kind))
        bias = spec.bias(at[:, None], where[:, None])
        x = x if bias is None else x + bias.astype(x.dtype)
        mask = spec.mask(at, where[:, None])
        mask &= (at[:, :, None] - where[:, None] < width[..., None])[:, None]
        added = jnp.where(mask[:, :, None], jnp.exp(x - lse[..., None]), 0.0).sum((2, 3))
        added += jax.lax.dynamic_slice_in_dim(sums, start, span, axis=2)
        return jax.lax.dynamic_update_slice_in_dim(sums, added, start, axis=2), None

    parts = ((new.q, -2), (lse, -1), (new.position, -1), (request.width, -1))
    blocks = [split_queries(x, axis, size) for x, axis in parts]
    return jax.lax.scan(add, jnp.zeros((b, h, t), kind), (*blocks, jnp.arange(0, t, size)))[0]
