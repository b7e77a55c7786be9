"""Eviction by one token per row: the slot of each head that it takes, in one layer or in all layers together."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.cache import ranks
from kvjax.policies.base import label_of
from kvjax.policies.policy import Policy
from kvjax.policies.rankings import HammingDistance, OldestFirst, Ranking
from kvjax.types import KV, Evicted, LayerTokens, Parts, PyTree, View, restored, wide
from kvjax.utils.dependence import depends_on
from pallas_kernels.evict import evict, replace_slots
from pallas_kernels.fused_decode import Hashed
from pallas_kernels.hamming import hamming
from pallas_kernels.ranking import EvictionRules

V = TypeVar("V", bound=View)

Replaced = tuple[Int[Array, "b h"], Any, Int[Array, "b h c"], dict[str, PyTree]]
"""Evicted position of each head, content of its slot or None, and positions and buffers with the new token."""


def entries(policy: Policy, view: View, new: LayerTokens) -> dict[str, PyTree]:
    """Return what new tokens store in their slots, except positions: leaves [b h t ...]."""
    return {"kv": policy.codec.encode(new, view.state.codec), "slots": policy.slots(new, view.state)}


def prepared(policy: Policy, view: V, new: LayerTokens) -> V:
    """Return the slots in which one new token per row can take one slot of each head."""
    if policy.may_shrink:
        view = shrunk(policy, view, new)
    return policy.codec.begin(view, new)


def write_token(
    policy: Policy,
    view: V,
    new: LayerTokens,
    *,
    ranking: Ranks | None = None,
    victim: ranks.Victim | None = None,
    pairs: bool = False,
) -> tuple[V, Evicted]:
    """Write one new token per row into the lowest-ranked slot of each head; a row of padding changes nothing.

    Args:
        view: slots from `prepared`.
        ranking: ranking of the slots; None to compute it.
        victim: slot that the token takes, if devices share the slots of heads and it is known already.
        pairs: True to return the evicted pairs. A residual has already absorbed all evicted pairs but these.
    """
    token = jax.tree.map(lambda leaf: leaf[:, :, 0], entries(policy, view, new))
    buffers = (view.position, new.position[:, 0], {"kv": view.kv, "slots": view.slots}, token)
    if new.spread.slots > 1:
        victim = victims_of([policy], [view], [new])[0] if victim is None else victim
        replaced = replace_slot_sharded(view, new, victim, buffers, pairs=pairs)
    else:
        ranking = ranked(policy, view, new) if ranking is None else ranking
        replaced = replace_slot(policy, view, new, ranking, buffers, pairs=pairs or policy.codec.ordered)
    evicted_position, evicted, position, contents = replaced
    after = view.replace(position=position, **contents)
    if policy.codec.ordered:
        after = policy.codec.rerank(after, new, evicted["slots"].codec, evicted_position)
    return after, evicted_pairs(view.state, new, evicted["kv"] if pairs else None, evicted_position)


def shrunk(policy: Policy, view: V, new: LayerTokens) -> V:
    """Evict the lowest-ranked slots of rows whose slot limit has just fallen; the new token finds an empty slot."""
    before = jnp.maximum(new.read - 1, new.prompt_length)
    fewer = ranks.slots_at(policy, view.limit, new) < ranks.slots_at(policy, view.limit, new, before)
    fewer &= new.valid[:, :1]

    # The branch returns only masks and the order of slots: XLA would copy a returned cache at every step.
    def evict_several() -> Any:
        leaving = ranks.best_slots(policy, view, new, view.capacity * new.spread.slots, reserved=1)[2]
        leaving &= fewer[..., None]
        after = policy.codec.settle(view.replace(position=jnp.where(leaving, -1, view.position)), new)
        return leaving, after.slots.codec, after.state.codec

    def evict_none() -> Any:
        return jnp.zeros(view.position.shape, bool), view.slots.codec, view.state.codec

    leaving, order, codec_state = jax.lax.cond(fewer.any(), evict_several, evict_none)
    state = view.state.replace(codec=codec_state)
    if (residual := policy.residual) is not None:
        folded = functools.partial(ranks.fold_evicted, residual, view, new, leaving)
        state = state.replace(residual=jax.lax.cond(fewer.any(), folded, lambda: state.residual))
    position = jnp.where(leaving, -1, view.position)
    return view.replace(position=position, slots=view.slots.replace(codec=order), state=state)


class Ranks(NamedTuple):
    """Ranking of slots, from which the victim follows."""

    scores: Array | None
    """Score of each slot, or None if ordering by position is enough."""
    rules: EvictionRules
    keep: Bool[Array, "b h c"] | None
    hashed: Hashed | None
    """Codes whose distances replace scores; None if there are none."""


def ranked(policy: Policy, view: View, new: LayerTokens) -> Ranks:
    """Rank a layer's slots by the policy when one token per row arrives; raise a ValueError for a quota."""
    # A policy that evicts several tokens at once has emptied a slot for this one.
    equal = jnp.zeros(view.position.shape, wide(new.k.dtype)) if policy.ranks_at_evictions else None
    scores, protected, ranking = ranks.scores(policy, view, new, ranking=equal)
    if protected.quota is not None:
        raise ValueError(
            f"{label_of(policy.protection)} has a quota, which plan {label_of(policy.plan)} does not keep; "
            "use a plan with slots for each head, such as adakv."
        )
    simple = protected.last is None and new.config.window is None
    rules = EvictionRules(protected.sinks, protected.recent, ranks.slots_at(policy, view.limit, new))
    by_age = simple and isinstance(ranking, OldestFirst)
    return Ranks(None if by_age else scores, rules, protected.keep, hashed_codes(ranking, view) if simple else None)


def hashed_codes(ranking: Ranking, view: View) -> Hashed | None:
    """Return a ranking by stored hash codes, for kernels that also write the codes; None for any other ranking."""
    if not isinstance(ranking, HammingDistance):
        return None
    codes, stored = jax.tree.leaves(ranking.codes), jax.tree.leaves(view.slots.score)
    same = len(codes) == len(stored) and all(code is buffer for code, buffer in zip(codes, stored, strict=True))
    return Hashed(ranking.hashing, view.slots.score) if same else None


def replace_slot(
    policy: Policy, view: View, new: LayerTokens, ranking: Ranks, buffers: tuple[Any, ...], *, pairs: bool
) -> Replaced:
    """Write one token per row into the lowest-ranked slot of each head; with `pairs`, return its former content.

    `buffers` are the positions of the slots, the position of the token [b], buffers, and the token's entries in them.
    """
    scores, rules, keep, hashed = ranking
    options: dict[str, Any] = dict(protection=rules, keep=keep)
    if hashed is None or policy.may_shrink:
        return evict(scores, *buffers, shrinks=policy.may_shrink, pairs=pairs, **options)[1:]
    slot = hamming(hashed.hashing.of_queries(), hashed.codes, view.position, new.position[:, 0], **options)
    return replace_slots(slot, *buffers, pairs=pairs)[1:]


def foreseen(policies: Sequence[Policy], views: Sequence[View], new: Sequence[LayerTokens]) -> bool:
    """Return whether the victims of several layers depend on nothing of the new tokens but their positions."""
    names = "q", "k", "v", "raw_q", "raw_k", "hidden"

    def rankings(contents: list[dict[str, Array]]) -> list[Any]:
        tokens = [token.replace(**content) for token, content in zip(new, contents, strict=True)]
        return [ranked(*layer)[:3] for layer in zip(policies, views, tokens, strict=True)]

    contents = [{name: getattr(token, name) for name in names} for token in new]
    return not depends_on(rankings, {"contents": contents})


def victims_of(
    policies: Sequence[Policy], views: Sequence[View], new: Sequence[LayerTokens]
) -> tuple[ranks.Victim, ...]:
    """Return the slots that one token per row takes in several layers, where devices share the slots of heads.

    One collective serves all layers, because small collectives take about equally long.
    """
    claims = []
    for policy, view, tokens in zip(policies, views, new, strict=True):
        scores, rules, keep, _ = ranked(policy, view, tokens)
        claims.append(ranks.claim(scores, view.position, tokens, rules, keep, policy.may_shrink))
    return ranks.victims_of_all(jnp.stack(claims), [view.capacity for view in views])


def replace_slot_sharded(
    view: View, new: LayerTokens, victim: ranks.Victim, buffers: tuple[Any, ...], *, pairs: bool
) -> Replaced:
    """Write tokens into known slots like `replace_slot`, where several devices share a head's slots.

    The device that holds the victim sends the other devices what they need of it.
    """
    _, _, evicted, position, contents = replace_slots(victim.slot, *buffers)
    is_here = victim.slot < view.capacity

    def sent(leaf: Array) -> Array:
        return new.spread.over_slots(jnp.where(is_here.reshape(*is_here.shape, *(1,) * (leaf.ndim - 2)), leaf, 0))

    kv = jax.tree.map(sent, evicted["kv"]) if pairs else evicted["kv"]
    states = evicted["slots"].replace(codec=jax.tree.map(sent, evicted["slots"].codec))
    evicted_position = jnp.where(new.valid[:, :1], victim.position, -1)
    return evicted_position, {"kv": kv, "slots": states}, position, contents


def evicted_pairs(state: Parts, new: LayerTokens, kv: KV | None, position: Int[Array, "b h"]) -> Evicted:
    """Return the pairs that one token per row evicts, in at least 32 bits, for a residual.

    `kv` is the former content of the slots, None for no pairs, and `position` is -1 where the slot was empty.
    """
    if kv is None:
        nowhere = jnp.full(new.k.shape[:3], -1, jnp.int32)
        return Evicted(jnp.zeros_like(new.k), jnp.zeros_like(new.v), nowhere, new.layer)
    stored = jax.tree.map(lambda leaf: leaf[:, :, None], kv)
    pair = restored(new.config.rope, stored, position[..., None], state.codec, wide(new.k.dtype))
    position = ranks.remembered_positions(position, new)
    return Evicted(pair.k, pair.v, position[..., None], new.layer)
