"""Slots that stay of a block of text: allocation of slots to heads, eviction in a layer, and what a residual does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import ranks
from kvjax.cache.buffers import in_memory
from kvjax.cache.evict import where_read
from kvjax.cache.paged.select import select
from kvjax.policies.policy import Policy
from kvjax.policies.rankings import between_heads
from kvjax.policies.residual import Queries, SlotResidual
from kvjax.types import Heads, LayerTokens, Parts, PyTree, View

V = TypeVar("V", bound=View)


class Kept(NamedTuple):
    """Slots that stay of a layer, and the rows whose scores are NaN."""

    slots: Any
    """The layer's slots, or `Selected` slots of a whole prompt under a plan with slots for each head."""
    undefined: Bool[Array, " b"] | None
    """True for rows with scores of NaN; None if no scores were computed."""


def keep_best(
    policy: Policy, view: View, new: LayerTokens, capacity: int, *, select_heads: bool, queries: Queries | None = None
) -> Kept:
    """Evict the lowest-ranked tokens of a layer, and let the residual absorb them or change the slots that stay.

    Args:
        view: slots with updated scores.
        new: the tokens just read.
        capacity: slots of the layer's buffers afterwards.
        select_heads: True to select slots, which have not been moved yet, of heads with slots of their own.
        queries: stand for later ones; None for those of the tokens just read.
    """
    ranking = policy.ranking(view, new)
    undefined = (jnp.isnan(ranking) & view.live).any((1, 2)) if isinstance(ranking, jax.Array) else None
    selected = None
    if select_heads:
        selected, leaving = select(policy, view, new)
        after = selected.view
    else:
        after, leaving = compressed(policy, view, new, capacity)
    if policy.residual is not None:
        memory = ranks.fold_evicted(policy.residual, view, new, leaving)
        after = after.replace(state=after.state.replace(residual=memory))
        after = _rewritten(policy, view, after, queries or Queries(new.q, new.valid), new)
    if policy.score.requires.host_memory:
        after = in_memory(after, jax.memory.Space.Host)
    return Kept(after if selected is None else selected.replace(view=after), undefined)


def compressed(policy: Policy, view: V, new: LayerTokens, capacity: int) -> tuple[V, Bool[Array, "b h c"]]:
    """Keep the best slots of each head in buffers of `capacity` slots; also return a mask of the evicted slots.

    Rows without new tokens keep their slots in place.
    """
    best, valid, leaving = ranks.best_slots(policy, view, new, capacity)
    kv, position, states = jax.tree.map(lambda leaf: ranks.gather(leaf, best), (view.kv, view.position, view.slots))
    smaller = view.replace(kv=kv, position=jnp.where(valid, position, -1), slots=states)
    return policy.codec.settle(smaller, new), leaving


def _rewritten(policy: Policy, before: View, after: View, queries: Queries, new: LayerTokens) -> View:
    """Return the slots that stay, as a residual of slots changes them for what has left."""
    residual = policy.residual
    rewritten = residual.rewrite(before, after, queries, new) if isinstance(residual, SlotResidual) else None
    if rewritten is None:
        return after
    changed = policy.codec.stored(rewritten.values), rewritten.bias
    values, states = where_read(new, changed, (after.kv.v, after.slots.residual))
    return after.replace(kv=after.kv.replace(v=values), slots=after.slots.replace(residual=states))


def allocated(policy: Policy, view: V, stats: PyTree, new: LayerTokens) -> V:
    """Return a layer, with all slots of a prompt, in which each head may use the slots that the plan gives it."""
    sizing, slot_ranks = policy.plan.sizing, None
    if sizing.per_head and sizing.mode == "budget":
        slot_ranks = _ranks(policy, view, new)
    limit, state = policy.plan.head_budgets(stats, view, slot_ranks, new)
    return _within_window(view, limit, view.state.plan if state is None else state, new)


def allocated_together(policies: Sequence[Policy], views: Sequence[View], new: Sequence[LayerTokens]) -> list[View]:
    """Return all layers with the slots that their plan gives each head, under `Sizing.all_layers`.

    Layers with a window shorter than a row's text keep that window and are not part of the allocation.
    """
    widest, every_rank, limits = max(view.capacity for view in views), list[Array](), list[Array]()
    for policy, view, tokens in zip(policies, views, new, strict=True):
        of_layer, bounded = _ranks(policy, view, tokens), _bounded_by_window(tokens)
        none = jnp.finfo(of_layer.dtype).min  # as empty slots
        of_layer = jnp.pad(of_layer, ((0, 0), (0, 0), (0, widest - view.capacity)), constant_values=none)
        every_rank.append(of_layer if bounded is None else jnp.where(bounded[:, None, None], none, of_layer))
        limits.append(view.limit if bounded is None else jnp.where(bounded[:, None], 0, view.limit))
    heads: Any = Heads(limit=jnp.concatenate(limits, axis=1), state=Parts())
    budgets, _ = policies[0].plan.head_budgets((), heads, jnp.concatenate(every_rank, axis=1), new[0])
    ends = np.cumsum([limit.shape[1] for limit in limits])[:-1].tolist()
    layers = zip(views, jnp.split(budgets, ends, axis=1), new, strict=True)
    return [_within_window(view, limit, view.state.plan, tokens) for view, limit, tokens in layers]


def _ranks(policy: Policy, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
    of_slots = ranks.rank(policy, view, new, between_heads)
    return ranks.with_newest(of_slots, view.position, new)  # each head keeps its newest token


def _bounded_by_window(new: LayerTokens) -> Bool[Array, " b"] | None:
    # Rows whose text exceeds the layer's window, which then overrides the budget.
    return None if new.config.window is None else new.config.bounded_by_window(new.end)


def _within_window(view: V, limit: Int[Array, "b h"], plan: PyTree, new: LayerTokens) -> V:
    # Allocates slots; no head has more than its layer's window, and rows whose text exceeds it keep what they had.
    bounded, window = _bounded_by_window(new), new.config.window
    if bounded is not None and window is not None:

        def choose(after: Array, old: Array) -> Array:
            return jnp.where(bounded.reshape(-1, *(1,) * (old.ndim - 1)), old, after)

        limit, plan = jax.tree.map(choose, (jnp.minimum(limit, window), plan), (view.limit, view.state.plan))
    return view.replace(limit=limit, state=view.state.replace(plan=plan))
