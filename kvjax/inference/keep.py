"""What stays of a block of text: eviction in one layer after its attention, and the residual's part in it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from kvjax.cache import slots
from kvjax.cache.dense import Dense
from kvjax.cache.paged.build import Selected, select
from kvjax.cache.step import Pending, update_score
from kvjax.inference.allocate import allocated
from kvjax.policies.policy import Policy
from kvjax.policies.residual import Queries, SlotResidual
from kvjax.types import New, View


class Kept(NamedTuple):
    """Slots that `keep_best` selects for separate heads, and the rows whose scores are NaN."""

    selected: Selected | None
    """Selected slots under a plan with slots for each head, which the storage does not hold."""
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
        policy: as the layer uses it.
        storage: the cache before, with updated scores.
        index: index of the layer in the storage.
        new: the tokens just read.
        capacity: slots of the layer's buffers afterwards.
        first: True if the plan has just allocated slots to heads.
        queries: stand for later ones; None for those of the tokens just read.
    """
    view, selected = storage.layers[index], None
    ranking = policy.ranking(view, new)
    undefined = (jnp.isnan(ranking) & view.live).any((1, 2)) if isinstance(ranking, jax.Array) else None
    if first and policy.plan.sizing.per_head:
        selected, leaving = select(policy, view, new)
        after = selected.view.replace(position=jnp.where(leaving, -1, view.position))
    else:
        storage, leaving = storage.compress(policy, index, new, capacity)
        after = storage.layers[index]
    if policy.residual is not None:
        remembered = slots.fold_evicted(policy.residual, view, new, leaving)
        after = after.replace(state=after.state.replace(residual=remembered))
        after = _rewritten(policy, view, after, queries or Queries(new.q, new.valid), new)
    if selected is not None:
        selected = selected.replace(view=after.replace(position=view.position))
    else:
        storage = storage.replace_layer(index, after)
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
