"""Eviction: the slot of each head that a new token takes, in one layer or in all layers together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.cache import slots
from kvjax.policies.policy import Policy
from kvjax.policies.rankings import HammingDistance, OldestFirst, Ranking
from kvjax.types import KV, Evicted, New, Parts, PyTree, View, restored, wide
from kvjax.utils.dependence import depends_on
from pallas_kernels.evict import evict
from pallas_kernels.evict import replace_slots as exchange_slots
from pallas_kernels.fused_decode import Hashed
from pallas_kernels.hamming import hamming
from pallas_kernels.ranking import EvictionRules

Exchanged = tuple[Int[Array, "b h"], Any, Int[Array, "b h c"], dict[str, PyTree]]
"""Evicted position of each head, content of its slot or None, and positions and buffers with the new token."""


class Ranks(NamedTuple):
    """Ranking of slots, from which the victim follows."""

    scores: Array | None
    """Score of each slot, or None if ordering by position is enough."""
    bounds: EvictionRules
    keep: Bool[Array, "b h c"] | None
    hashed: Hashed | None
    """Codes whose distances replace scores; None if there are none."""


def ranked(policy: Policy, view: View, new: New) -> Ranks:
    """Rank a layer's slots by the policy when one token per row arrives; raise a ValueError for a quota."""
    # A policy that evicts several tokens at once has made room for this one.
    equal = jnp.zeros(view.position.shape, wide(new.k.dtype)) if policy.ranks_at_evictions else None
    scores, guard, ranking = slots.scores(policy, view, new, ranking=equal)
    if guard.quota is not None:
        raise ValueError(
            f"{policy.protection.label} has a quota, which plan {policy.plan.label} does not keep; "
            "use a plan with slots for each head, such as adakv."
        )
    simple = guard.last is None and new.config.window is None
    bounds = EvictionRules(guard.sinks, guard.recent, slots.slots_at(policy, view.limit, new))
    by_age = simple and isinstance(ranking, OldestFirst)
    return Ranks(None if by_age else scores, bounds, guard.keep, hashed_codes(ranking, view) if simple else None)


def hashed_codes(ranking: Ranking, view: View) -> Hashed | None:
    """Return a ranking by stored hash codes, for kernels that also write the codes; None for any other ranking."""
    if not isinstance(ranking, HammingDistance):
        return None
    codes, stored = jax.tree.leaves(ranking.codes), jax.tree.leaves(view.slots.score)
    same = len(codes) == len(stored) and all(one is other for one, other in zip(codes, stored, strict=True))
    return Hashed(ranking.hashing, view.slots.score) if same else None


def replace_slot(policy: Policy, view: View, new: New, held: tuple[Any, ...], *, pairs: bool) -> Exchanged:
    """Write one token per row into the lowest-ranked slot of each head; with `pairs`, return its former content.

    `held` are the positions of the slots, the position of the token [b], buffers, and the token's entries in them.
    """
    scores, bounds, keep, hashed = ranked(policy, view, new)
    asked: dict[str, Any] = dict(protection=bounds, keep=keep, **new.kernels._asdict())
    if hashed is None or policy.may_shrink:
        return evict(scores, *held, shrinks=policy.may_shrink, pairs=pairs, **asked)[1:]
    slot = hamming(hashed.hashing.of_queries(), hashed.codes, view.position, new.position[:, 0], **asked)
    return exchange_slots(slot, *held, pairs=pairs)[1:]


def foreseen(policies: Sequence[Policy], views: Sequence[View], new: Sequence[New]) -> bool:
    """Return whether the victims of several layers depend on nothing of the new tokens but their positions."""
    names = "q", "k", "v", "raw_q", "raw_k", "hidden"

    def standing(contents: list[dict[str, Array]]) -> list[Any]:
        tokens = [told.replace(**known) for told, known in zip(new, contents, strict=True)]
        return [ranked(*given)[:3] for given in zip(policies, views, tokens, strict=True)]

    contents = [{name: getattr(told, name) for name in names} for told in new]
    return not depends_on(standing, {"contents": contents})


def victims_of(policies: Sequence[Policy], views: Sequence[View], new: Sequence[New]) -> tuple[slots.Victim, ...]:
    """Return the slots that one token per row takes in several layers, where devices share the slots of heads.

    One collective serves all layers, because small collectives take about equally long.
    """
    claims = []
    for policy, view, tokens in zip(policies, views, new, strict=True):
        scores, bounds, keep, _ = ranked(policy, view, tokens)
        claims.append(slots.claim(scores, view.position, tokens, bounds, keep, policy.may_shrink))
    return slots.victims_of_all(jnp.stack(claims), [view.capacity for view in views])


def replace_slot_sharded(
    view: View, new: New, victim: slots.Victim, held: tuple[Any, ...], *, pairs: bool
) -> Exchanged:
    """Write tokens into known slots like `replace_slot`, where several devices share a head's slots.

    The device that holds the victim sends the other devices what they need of it.
    """
    _, _, taken, position, buffers = exchange_slots(victim.slot, *held)
    here = victim.slot < view.capacity

    def told(leaf: Array) -> Array:
        return new.spread.over_slots(jnp.where(here.reshape(*here.shape, *(1,) * (leaf.ndim - 2)), leaf, 0))

    kv = jax.tree.map(told, taken["kv"]) if pairs else taken["kv"]
    remembered = taken["slots"].replace(codec=jax.tree.map(told, taken["slots"].codec))
    left = jnp.where(new.valid[:, :1], victim.position, -1)
    return left, {"kv": kv, "slots": remembered}, position, buffers


def evicted_pairs(state: Parts, new: New, kv: KV | None, left: Int[Array, "b h"]) -> Evicted:
    """Return the pairs that one token per row evicts, in at least 32 bits, for a residual.

    `kv` is the former content of the slots, None for no pairs, and `left` the position, -1 if the slot was empty.
    """
    if kv is None:
        nowhere = jnp.full(new.k.shape[:3], -1, jnp.int32)
        return Evicted(jnp.zeros_like(new.k), jnp.zeros_like(new.v), nowhere, new.layer, new.kernels)
    stored = jax.tree.map(lambda leaf: leaf[:, :, None], kv)
    pair = restored(new.config.rope, stored, left[..., None], state.codec, wide(new.k.dtype))
    remembered = slots.remembered_positions(left, new)
    return Evicted(pair.k, pair.v, remembered[..., None], new.layer, new.kernels)
