"""Attention statistics over pages for a score's requests, one block of pages at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.paged.pages import LayerPages, owned
from kvjax.cache.stats import Outputs, damage, highest, normalised, outputs, seen_slots, summed, tempered
from kvjax.policies.policy import Policy
from kvjax.policies.stats import Again, Damage, Peak, Probs, Seen, Sums, questions
from kvjax.types import New, PyTree, View
from pallas_kernels.paged_attention import PagedResult as Found


def check_asks(policy: Policy, asks: PyTree) -> None:
    """Refuse statistics of a generated token that need the same slots in all heads."""
    for ask in questions(asks)[0]:
        score, plan = policy.label, policy.plan.label
        if isinstance(ask, Again):
            raise ValueError(
                f"{score} computes attention of earlier queries again, over equally many slots in every head, which "
                f"plan {plan} does not give; choose another plan."
            )
        if isinstance(ask, Sums) and ask.over != "group":
            raise ValueError(
                f"{score} requests Sums(over={ask.over!r}), which takes the same slots in every head, and plan {plan} "
                "does not give them; use over='group', or choose another plan."
            )


class PageAnswers(NamedTuple):
    """Attention results of a step, from which the statistics of each page are computed."""

    logits: Float[Array, "P_or_more g s"]
    lse: Float[Array, "o g"]
    totals: tuple[Any, ...]
    """Sum of the numerators of each request's own softmax [o g], the `Outputs` of a `Damage`, or None."""
    visible: Int[Array, " o"] | None
    """Number of keys that each head's query saw, if requested."""


def page_answers(layer: LayerPages, new: New, asks: PyTree, found: Found) -> PageAnswers:
    """Collect the results of attention over a layer's pages for `of_pages`."""
    lse = found.lse.reshape(-1, found.lse.shape[-1])
    lse = jnp.where(lse > -jnp.inf, lse, jnp.inf)  # queries that see no key contribute 0
    counts = any(isinstance(ask, Probs) for ask in questions(asks)[0])
    visible = _visible(layer, new) if counts else None
    return PageAnswers(found.logits, lse, _totals(layer, new, asks, found.logits, lse), visible)


def of_pages(
    asks: PyTree, answers: PageAnswers, view: View, seen: New, at: Array, owner: Int[Array, " p"], new: New
) -> PyTree:
    """Compute the requested statistics of a block of pages from page `at` on.

    `seen` are the new tokens with the rows of `view`, `new` those with the rows of the batch.
    """
    leaves, tree = questions(asks)
    probs = _probabilities(answers.logits, answers.lse, at, owner, len(owner))

    def told(ask: Any, total: Any) -> Any:
        if isinstance(ask, Probs):
            assert answers.visible is not None
            visible = answers.visible[owner][:, None, None]
            return Seen(probs, seen.position, visible, seen_slots(view.position, seen))
        ask = _question_of_pages(ask, owner, new)
        if isinstance(ask, Damage):
            values = view.values(seen).astype(probs.dtype)
            return damage(ask, probs, values, jax.tree.map(lambda x: x[owner][:, None, :, None], total))
        if isinstance(ask, Peak):
            return highest(ask, probs)
        shares = probs
        if total is not None:
            shares = tempered(ask, probs, view.position, seen)
            shares = normalised(shares, total[owner][:, None, :, None, None])
        return summed(ask, shares)

    return tree.unflatten(told(ask, total) for ask, total in zip(leaves, answers.totals, strict=True))


def _totals(layer: LayerPages, new: New, asks: PyTree, logits: Array, lse: Array) -> tuple[Any, ...]:
    # A request's own softmax is normalised over all pages of a head, which takes another pass over the logits; so do
    # the outputs from which evictions take away.
    leaves = questions(asks)[0]
    wanted = [isinstance(ask, Damage) or (isinstance(ask, Sums) and not ask.plain) for ask in leaves]
    if not any(wanted):
        return (None,) * len(leaves)
    (rows, heads), width = new.v.shape[:2], new.v.shape[-1]
    nothing = jnp.zeros((rows * heads, lse.shape[-1], width), lse.dtype)
    none = Outputs(jnp.zeros_like(lse), nothing, jnp.zeros_like(lse), nothing)

    def add(carry: Any, at: Array, valid: Array) -> Any:
        view, seen, owner = layer.view(new, at, len(valid))
        probs = _probabilities(logits, lse, at, owner, len(valid))
        members = owned(owner, valid, len(lse)).astype(lse.dtype)

        def shares(ask: Any) -> Any:
            if isinstance(ask, Damage):
                found = outputs(probs, view.values(seen).astype(probs.dtype))
                return jax.tree.map(lambda x: x[:, 0, :, 0], found)
            return tempered(_question_of_pages(ask, owner, new), probs, view.position, seen)[:, 0, :, 0].sum(-1)

        def more(total: Any, ask: Any) -> Any:
            # Mask pages of other layers, which hold logits of those layers.
            return jax.tree.map(
                lambda total, x: (
                    total
                    + jnp.einsum("op,p...->o...", members, jnp.where(valid.reshape(-1, *(1,) * (x.ndim - 1)), x, 0.0))
                ),
                total,
                shares(ask),
            )

        return tuple(None if total is None else more(total, ask) for total, ask in zip(carry, leaves, strict=True))

    begun = [
        (none if isinstance(ask, Damage) else none.rest) if own else None
        for ask, own in zip(leaves, wanted, strict=True)
    ]
    return layer.over_pages(add, tuple(begun))


def _visible(layer: LayerPages, new: New) -> Int[Array, " o"]:
    # Counts the keys that each head's query saw.
    owners = layer.limit.size

    def count(carry: Array, at: Array, valid: Array) -> Array:
        view, seen, owner = layer.view(new, at, len(valid))
        here = seen_slots(view.position, seen).sum((1, 2, 3), dtype=jnp.int32)
        return carry + jnp.where(owned(owner, valid, owners), here, 0).sum(1, dtype=jnp.int32)

    return layer.over_pages(count, jnp.zeros(owners, jnp.int32))


def _probabilities(logits: Array, lse: Array, at: Array, owner: Array, count: int) -> Float[Array, "p 1 g 1 s"]:
    return jnp.exp(jax.lax.dynamic_slice_in_dim(logits, at, count) - lse[owner][..., None])[:, None, :, None]


def _question_of_pages(ask: Any, owner: Int[Array, " p"], new: New) -> Any:
    """Convert a request about rows and heads to one about pages."""
    rows, heads = new.k.shape[:2]
    weights = ask.weights
    if weights is not None:
        whole = jnp.broadcast_to(weights, (rows, heads, new.position.shape[1]))
        weights = whole.reshape(-1, 1, whole.shape[-1])[owner]
    if not isinstance(ask, Sums):
        return ask.replace(weights=weights)
    tau = ask.tau if isinstance(ask.tau, float) else ask.tau[owner // heads]
    return ask.replace(tau=tau, weights=weights)
