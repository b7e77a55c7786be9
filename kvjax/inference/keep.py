"""What stays of a block of text: allocation of slots to heads, eviction in a layer, and the residual's part in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import slots
from kvjax.cache.dense import Dense
from kvjax.cache.paged.build import Selected, select
from kvjax.cache.step import Pending, update_score
from kvjax.policies.policy import Policy
from kvjax.policies.rankings import between_heads
from kvjax.policies.residual import Queries, SlotResidual
from kvjax.types import Heads, New, Parts, PyTree, View


class Kept(NamedTuple):
    """Slots that `keep_best` selects under a plan with slots for each head, and the rows whose scores are NaN."""

    selected: Selected | None
    undefined: Bool[Array, " b"] | None
    """True for rows with scores of NaN; None if no scores were computed."""


def keep_after(
    policy: Policy, storage: Dense, index: int, told: Pending, capacity: int, first: bool
) -> tuple[Dense, Kept]:
    """Update the score of a layer after attention, and evict the lowest-ranked tokens; see `keep_best`."""
    asks, answers, new = told
    storage = update_score(policy, storage, index, asks["score"], answers["score"], new)
    if first:
        storage = storage.replace_layer(index, allocated(policy, storage.layers[index], answers["plan"], new))
    return keep_best(policy, storage, index, new, capacity, first=first)


def keep_best(
    policy: Policy,
    storage: Dense,
    index: int,
    new: New,
    capacity: int,
    *,
    first: bool,
    queries: Queries | None = None,
) -> tuple[Dense, Kept]:
    """Evict the lowest-ranked tokens of a layer, and let the residual absorb them or change the slots that stay.

    Args:
        new: the tokens just read, of which `storage` has updated scores.
        capacity: slots of the layer's buffers afterwards.
        first: True if the plan has just allocated slots to heads.
        queries: stand for later ones; None for those of the tokens just read.
    """
    view, selected = storage.layers[index], None
    ranking = policy.ranking(view, new)
    undefined = (jnp.isnan(ranking) & view.live).any((1, 2)) if isinstance(ranking, jax.Array) else None
    if first and policy.plan.sizing.per_head:
        selected, leaving = select(policy, view, new)
        after = selected.view
    else:
        storage, leaving = storage.compress(policy, index, new, capacity)
        after = storage.layers[index]
    if policy.residual is not None:
        remembered = slots.fold_evicted(policy.residual, view, new, leaving)
        after = after.replace(state=after.state.replace(residual=remembered))
        after = _rewritten(policy, view, after, queries or Queries(new.q, new.valid), new)
    if selected is None:
        storage = storage.replace_layer(index, after)
    else:
        selected = selected.replace(view=after)
    if policy.score.requires.host_memory:
        storage = storage.moved(index, jax.memory.Space.Host)
    return storage, Kept(selected, undefined)


def _rewritten(policy: Policy, before: View, after: View, queries: Queries, new: New) -> View:
    """Return the slots that stay, as a residual of slots changes them for what has left."""
    residual = policy.residual
    found = residual.rewrite(before, after, queries, new) if isinstance(residual, SlotResidual) else None
    if found is None:
        return after
    changed = policy.codec.stored(found.values), found.bias
    values, states = slots.where_read(new, changed, (after.kv.v, after.slots.residual))
    return after.replace(kv=after.kv.replace(v=values), slots=after.slots.replace(residual=states))


def allocated(policy: Policy, view: View, answers: PyTree, new: New) -> View:
    """Return a layer, with all slots of a prompt, in which each head may use the slots that the plan gives it."""
    sizing, ranks = policy.plan.sizing, None
    if sizing.per_head and sizing.mode == "budget":
        ranks = _ranks(policy, view, new)
    limit, state = policy.plan.head_budgets(answers, view, ranks, new)
    return _within_window(view, limit, view.state.plan if state is None else state, new)


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
    return [_within_window(view, limit, view.state.plan, tokens) for view, limit, tokens in layers]


def _ranks(policy: Policy, view: View, new: New) -> Float[Array, "b h c"]:
    ranks = slots.rank(policy, view, new, between_heads)
    return slots.with_newest(ranks, view.position, new)  # each head keeps its newest token


def _apart(new: New) -> Bool[Array, " b"] | None:
    # Rows whose text exceeds the layer's window, which then overrides the budget.
    return None if new.config.window is None else new.config.bounds(new.end)


def _within_window(view: View, limit: Int[Array, "b h"], plan: PyTree, new: New) -> View:
    # Allocates slots; no head has more than its layer's window, and rows whose text exceeds it keep what they had.
    apart, window = _apart(new), new.config.window
    if apart is not None and window is not None:

        def kept(after: Array, old: Array) -> Array:
            return jnp.where(apart.reshape(-1, *(1,) * (old.ndim - 1)), old, after)

        limit, plan = jax.tree.map(kept, (jnp.minimum(limit, window), plan), (view.limit, view.state.plan))
    return view.replace(limit=limit, state=view.state.replace(plan=plan))
