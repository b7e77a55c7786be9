"""Allocation of slots to heads by a plan, after a prompt has been read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import slots
from kvjax.policies.policy import Policy
from kvjax.policies.rankings import between_heads
from kvjax.types import Heads, New, Parts, PyTree, View

Settled = tuple[Int[Array, "b h"], PyTree]
"""Limits of heads, and the plan's state."""


def allocated(policy: Policy, view: View, answers: PyTree, new: New) -> View:
    """Return a layer, with all slots of a prompt, in which each head may use the slots that the plan gives it."""
    sizing, ranks = policy.plan.sizing, None
    if sizing.per_head and sizing.mode == "budget":
        ranks = _ranks(policy, view, new)
    limit, found = policy.plan.head_budgets(answers, view, ranks, new)
    found = view.state.plan if found is None else found
    settled = _within_window((limit, found), (view.limit, view.state.plan), new)
    return view.replace(limit=settled[0], state=view.state.replace(plan=settled[1]))


def allocated_together(policies: Sequence[Policy], views: Sequence[View], new: Sequence[New]) -> list[View]:
    """Return all layers with the slots that their plan gives each head, under `Sizing.all_layers`.

    Layers with a window shorter than a row's text keep that window and are not part of the allocation.
    """
    widest, ranks, limits = max(view.capacity for view in views), list[Array](), list[Array]()
    for policy, view, tokens in zip(policies, views, new, strict=True):
        found, apart = _ranks(policy, view, tokens), _apart(tokens)
        none = jnp.finfo(found.dtype).min  # as empty slots
        found = jnp.pad(found, ((0, 0), (0, 0), (0, widest - view.capacity)), constant_values=none)
        ranks.append(found if apart is None else jnp.where(apart[:, None, None], none, found))
        limits.append(view.limit if apart is None else jnp.where(apart[:, None], 0, view.limit))
    every: Any = Heads(limit=jnp.concatenate(limits, axis=1), state=Parts())
    found, _ = policies[0].plan.head_budgets((), every, jnp.concatenate(ranks, axis=1), new[0])
    ends = np.cumsum([limit.shape[1] for limit in limits])[:-1].tolist()
    layers = zip(views, jnp.split(found, ends, axis=1), new, strict=True)
    return [
        view.replace(limit=_within_window((limit, None), (view.limit, None), tokens)[0])
        for view, limit, tokens in layers
    ]


def _ranks(policy: Policy, view: View, new: New) -> Float[Array, "b h c"]:
    ranks = slots.rank(policy, view, new, between_heads)
    return slots.with_newest(ranks, view.position, new)  # each head keeps its newest token


def _apart(new: New) -> Bool[Array, " b"] | None:
    # Rows whose text exceeds the layer's window, which then overrides the budget.
    return None if new.config.window is None else new.config.bounds(new.end)


def _within_window(settled: Settled, before: Settled, new: New) -> Settled:
    # No head has more slots than its layer's window, and rows whose text exceeds it keep what they had.
    apart, window = _apart(new), new.config.window
    if apart is None or window is None:
        return settled

    def kept(after: Array, old: Array) -> Array:
        return jnp.where(apart.reshape(-1, *(1,) * (old.ndim - 1)), old, after)

    return jax.tree.map(kept, (jnp.minimum(settled[0], window), settled[1]), before)
