"""Attention statistics over pages for a score's requests, one block of pages at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.paged.pages import LayerPages, owned
from kvjax.cache.stats import Outputs, damage, highest, normalised, outputs, seen_slots, summed, tempered
from kvjax.policies.base import label_of
from kvjax.policies.policy import Policy
from kvjax.policies.stats import AttentionProbs, AttentionSum, Damage, Peak, ReplayedQueries, Seen, flatten_requests
from kvjax.types import LayerTokens, PyTree, View
from pallas_kernels.paged_attention import PagedResult


def check_asks(policy: Policy, requests: PyTree) -> None:
    """Refuse statistics of a generated token that need the same slots in all heads."""
    for request in flatten_requests(requests)[0]:
        score, plan = policy.label, label_of(policy.plan)
        if isinstance(request, ReplayedQueries):
            raise ValueError(
                f"{score} computes attention of earlier queries again, over equally many slots in every head, which "
                f"plan {plan} does not give; choose another plan."
            )
        if isinstance(request, AttentionSum) and request.over != "group":
            raise ValueError(
                f"{score} requests AttentionSum(over={request.over!r}), which takes the same slots in every head, and "
                f"plan {plan} does not give them; use over='group', or choose another plan."
            )


class PageStats(NamedTuple):
    """Attention results of a step, from which the statistics of each page are computed."""

    logits: Float[Array, "P_or_more g s"]
    lse: Float[Array, "o g"]
    totals: tuple[Any, ...]
    """Sum of the numerators of each request's own softmax [o g], the `Outputs` of a `Damage`, or None."""
    visible: Int[Array, " o"] | None
    """Number of keys that each head's query saw, if requested."""


def page_stats(layer: LayerPages, new: LayerTokens, requests: PyTree, attention: PagedResult) -> PageStats:
    """Collect the results of attention over a layer's pages for `of_pages`."""
    lse = attention.lse.reshape(-1, attention.lse.shape[-1])
    lse = jnp.where(lse > -jnp.inf, lse, jnp.inf)  # queries that see no key contribute 0
    counts = any(isinstance(request, AttentionProbs) for request in flatten_requests(requests)[0])
    visible = _visible(layer, new) if counts else None
    return PageStats(attention.logits, lse, _totals(layer, new, requests, attention.logits, lse), visible)


def of_pages(
    requests: PyTree,
    stats: PageStats,
    view: View,
    tokens: LayerTokens,
    at: Array,
    owner: Int[Array, " p"],
    new: LayerTokens,
) -> PyTree:
    """Compute the requested statistics of a block of pages from page `at` on.

    `tokens` are the new tokens with the rows of `view`, `new` those with the rows of the batch.
    """
    leaves, tree = flatten_requests(requests)
    probs = _probabilities(stats.logits, stats.lse, at, owner, len(owner))

    def stat(request: Any, total: Any) -> Any:
        if isinstance(request, AttentionProbs):
            assert stats.visible is not None
            visible = stats.visible[owner][:, None, None]
            return Seen(probs, tokens.position, visible, seen_slots(view.position, tokens))
        request = _request_of_pages(request, owner, new)
        if isinstance(request, Damage):
            values = view.values(tokens).astype(probs.dtype)
            return damage(request, probs, values, jax.tree.map(lambda x: x[owner][:, None, :, None], total))
        if isinstance(request, Peak):
            return highest(request, probs)
        shares = probs
        if total is not None:
            shares = tempered(request, probs, view.position, tokens)
            shares = normalised(shares, total[owner][:, None, :, None, None])
        return summed(request, shares)

    return tree.unflatten(stat(request, total) for request, total in zip(leaves, stats.totals, strict=True))


def _totals(layer: LayerPages, new: LayerTokens, requests: PyTree, logits: Array, lse: Array) -> tuple[Any, ...]:
    # A request's own softmax is normalised over all pages of a head, which takes another pass over the logits; so do
    # the outputs from which evictions take away.
    leaves = flatten_requests(requests)[0]
    needs_total = [
        isinstance(request, Damage) or (isinstance(request, AttentionSum) and not request.plain) for request in leaves
    ]
    if not any(needs_total):
        return (None,) * len(leaves)
    (rows, heads), width = new.v.shape[:2], new.v.shape[-1]
    nothing = jnp.zeros((rows * heads, lse.shape[-1], width), lse.dtype)
    none = Outputs(jnp.zeros_like(lse), nothing, jnp.zeros_like(lse), nothing)

    def add(carry: Any, at: Array, valid: Array) -> Any:
        view, tokens, owner = layer.view(new, at, len(valid))
        probs = _probabilities(logits, lse, at, owner, len(valid))
        members = owned(owner, valid, len(lse)).astype(lse.dtype)

        def shares(request: Any) -> Any:
            if isinstance(request, Damage):
                sums = outputs(probs, view.values(tokens).astype(probs.dtype))
                return jax.tree.map(lambda x: x[:, 0, :, 0], sums)
            return tempered(_request_of_pages(request, owner, new), probs, view.position, tokens)[:, 0, :, 0].sum(-1)

        def more(total: Any, request: Any) -> Any:
            # Mask pages of other layers, which hold logits of those layers.
            return jax.tree.map(
                lambda total, x: (
                    total
                    + jnp.einsum("op,p...->o...", members, jnp.where(valid.reshape(-1, *(1,) * (x.ndim - 1)), x, 0.0))
                ),
                total,
                shares(request),
            )

        return tuple(
            None if total is None else more(total, request) for total, request in zip(carry, leaves, strict=True)
        )

    zeros = [
        (none if isinstance(request, Damage) else none.light_share) if needed else None
        for request, needed in zip(leaves, needs_total, strict=True)
    ]
    return layer.over_pages(add, tuple(zeros))


def _visible(layer: LayerPages, new: LayerTokens) -> Int[Array, " o"]:
    # Counts the keys that each head's query saw.
    owners = layer.limit.size

    def count(carry: Array, at: Array, valid: Array) -> Array:
        view, tokens, owner = layer.view(new, at, len(valid))
        counts = seen_slots(view.position, tokens).sum((1, 2, 3), dtype=jnp.int32)
        return carry + jnp.where(owned(owner, valid, owners), counts, 0).sum(1, dtype=jnp.int32)

    return layer.over_pages(count, jnp.zeros(owners, jnp.int32))


def _probabilities(logits: Array, lse: Array, at: Array, owner: Array, count: int) -> Float[Array, "p 1 g 1 s"]:
    return jnp.exp(jax.lax.dynamic_slice_in_dim(logits, at, count) - lse[owner][..., None])[:, None, :, None]


def _request_of_pages(request: Any, owner: Int[Array, " p"], new: LayerTokens) -> Any:
    """Convert a request about rows and heads to one about pages."""
    rows, heads = new.k.shape[:2]
    weights = request.weights
    if weights is not None:
        per_head = jnp.broadcast_to(weights, (rows, heads, new.position.shape[1]))
        weights = per_head.reshape(-1, 1, per_head.shape[-1])[owner]
    if not isinstance(request, AttentionSum):
        return request.replace(weights=weights)
    tau = request.tau if isinstance(request.tau, float) else request.tau[owner // heads]
    return request.replace(tau=tau, weights=weights)
