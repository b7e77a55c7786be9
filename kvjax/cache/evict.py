"""Eviction by one token per row: the ranking of slots, and the slot of each head that the token takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvjax.policies.base import label_of
from kvjax.policies.policy import Policy
from kvjax.policies.protection import Protected
from kvjax.policies.rankings import HammingDistance, OldestFirst, Ranking, as_numbers
from kvjax.types import KV, SLOTS, Evicted, LayerTokens, Parts, PyTree, TokenBatch, View, restored, wide
from kvjax.utils.dependence import depends_on
from pallas_kernels import ranking as slot_ranking
from pallas_kernels.attention import Partial
from pallas_kernels.evict import evict, replace_slots
from pallas_kernels.fused_decode import Hashed
from pallas_kernels.hamming import hamming
from pallas_kernels.ranking import EvictionRules

V = TypeVar("V", bound=View)

Replaced = tuple[Int[Array, "b h"], Any, Int[Array, "b h c"], dict[str, PyTree]]
"""Evicted position of each head, content of its slot or None, and positions and buffers with the new token."""


Numbers = Callable[[Ranking, View], Float[Array, "b h c"]]
"""Scores of a ranking: `as_numbers` or `between_heads`."""


class Attended(NamedTuple):
    """Attention over a layer's slots and evicted pairs, with the statistics that the policy requested."""

    partial: Partial
    stats: Any
    """Statistics in the storage's own format, for its `update_slot`."""


def entries(policy: Policy, view: View, new: LayerTokens) -> dict[str, PyTree]:
    """Return what new tokens store in their slots, except positions: leaves [b h t ...]."""
    return {"kv": policy.codec.encode(new, view.state.codec), "slots": policy.slots(new, view.state)}


def write_token(
    policy: Policy,
    view: V,
    new: LayerTokens,
    *,
    ranking: Ranks | None = None,
    victim: Victim | None = None,
    pairs: bool = False,
) -> tuple[V, Evicted]:
    """Write one new token per row into the lowest-ranked slot of each head; a row of padding changes nothing.

    Args:
        view: slots from `Slots.prepared`.
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


def last_resort(dtype: DTypeLike) -> float:
    """Return a score above all others, for tokens that are evicted only if nothing else can be and no slot is empty."""
    return float(jnp.finfo(dtype).max) / 2


def scores(
    policy: Policy, view: View, new: LayerTokens, numbers: Numbers = as_numbers, ranking: Ranking | None = None
) -> tuple[Float[Array, "b h c"], Protected, Ranking]:
    """Return the score of each slot, its protection and the ranking; tokens to evict last score highest.

    Tokens outside the layer's own window are expired, even if protected, because later queries do not see them. A layer
    whose number of slots per head equals its window therefore holds exactly that window, under any policy. `ranking`
    replaces the policy's own, and `numbers` converts it to scores.
    """
    with jax.named_scope("scores"):
        ranking = policy.ranking(view, new) if ranking is None else ranking
        values = ranking if isinstance(ranking, jax.Array) else numbers(ranking, view)
        protected = policy.protection.guard(view, new)
    if protected.last is not None:
        values = jnp.where(protected.last, last_resort(values.dtype), values)
    if new.config.window is not None:
        values = jnp.where(in_window(view.position, new), values, -jnp.inf)
    return values, protected, ranking


def in_window(position: Int[Array, "b h *c"], new: LayerTokens) -> Bool[Array, "b h *c"]:
    """Return a mask of the positions that the newest token still sees: all of them in a layer without a window."""
    if new.config.window is None:
        return jnp.ones(position.shape, bool)
    newest = new.newest.reshape(-1, *(1,) * (position.ndim - 1))
    return position > newest - new.config.window


def remembered_positions(position: Int[Array, "b h *c"], new: LayerTokens) -> Int[Array, "b h *c"]:
    """Return positions of evicted tokens for `Evicted`: -1 for tokens outside the layer's window."""
    return jnp.where(in_window(position, new), position, -1)


def slots_at(
    policy: Policy, limit: Int[Array, "b h"], new: LayerTokens, length: Int[Array, " b"] | None = None
) -> Int[Array, "b h"]:
    """Return the slots that heads may use in a text of `length` tokens, by default `new.length`.

    Heads may use all slots in `limit` if the layer's window bounds the text.
    """
    slots = policy.slots_at(limit, new.length if length is None else length)
    return jnp.where(new.config.bounded_by_window(new.end)[:, None], limit, slots) if new.config.local else slots


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
    values, protected, ranking = scores(policy, view, new, ranking=equal)
    if protected.quota is not None:
        raise ValueError(
            f"{label_of(policy.protection)} has a quota, which plan {label_of(policy.plan)} does not keep; "
            "use a plan with slots for each head, such as adakv."
        )
    simple = protected.last is None and new.config.window is None
    rules = EvictionRules(protected.sinks, protected.recent, slots_at(policy, view.limit, new))
    by_age = simple and isinstance(ranking, OldestFirst)
    return Ranks(None if by_age else values, rules, protected.keep, hashed_codes(ranking, view) if simple else None)


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


class Victim(NamedTuple):
    """Slot that a new token takes, chosen among all devices that share a head's slots."""

    slot: Int[Array, "b h"]
    """Number of the slot on this device; the capacity if another device has the slot."""
    position: Int[Array, "b h"]
    """Position of the token in the slot; -1 if the slot is empty."""


def foreseen(policies: Sequence[Policy], views: Sequence[View], new: Sequence[LayerTokens]) -> bool:
    """Return whether the victims of several layers depend on nothing of the new tokens but their positions."""
    names = "q", "k", "v", "raw_q", "raw_k", "hidden"

    def rankings(contents: list[dict[str, Array]]) -> list[Any]:
        tokens = [token.replace(**content) for token, content in zip(new, contents, strict=True)]
        return [ranked(*layer)[:3] for layer in zip(policies, views, tokens, strict=True)]

    contents = [{name: getattr(token, name) for name in names} for token in new]
    return not depends_on(rankings, {"contents": contents})


def victims_of(policies: Sequence[Policy], views: Sequence[View], new: Sequence[LayerTokens]) -> tuple[Victim, ...]:
    """Return the slots that one token per row takes in several layers, where devices share the slots of heads.

    One collective serves all layers, because small collectives take about equally long.
    """
    claims = []
    for policy, view, tokens in zip(policies, views, new, strict=True):
        scores, rules, keep, _ = ranked(policy, view, tokens)
        claims.append(claim(scores, view.position, tokens, rules, keep, policy.may_shrink))
    return victims_of_all(jnp.stack(claims), [view.capacity for view in views])


def claim(
    scores: Float[Array, "b h c"] | None,
    position: Int[Array, "b h c"],
    new: LayerTokens,
    rules: EvictionRules,
    keep: Bool[Array, "b h c"] | None,
    shrinks: bool,
) -> Int[Array, "3 b h"]:
    """Return the victim among each head's slots on this device, where several devices share the slots.

    It is given as its rank in bits, the position of its token, and its index among the slots of all devices. Scores are
    None if the oldest is evicted first; `shrinks` is as for `pallas_kernels.ranking.victim`.
    """
    last, capacity = jnp.iinfo(jnp.int32).max, position.shape[-1]
    slot = jax.lax.axis_index(SLOTS) * capacity + jnp.arange(capacity, dtype=jnp.int32)
    sinks, recent, limit = (rule[..., None] for rule in rules)
    ranks = slot_ranking.rank(scores, position, new.position[:, :1, None], sinks, recent, keep)
    live = position >= 0
    usable = slot < limit
    if shrinks:
        usable = live | (new.spread.over_slots(live.sum(-1, keepdims=True, dtype=jnp.int32)) < limit)
    ranks = jnp.where(usable, ranks, jnp.inf)
    lowest = ranks.min(-1)
    age = jnp.where(usable & (ranks == lowest[..., None]), position, last)
    place = jnp.where(age == age.min(-1, keepdims=True), slot, last).min(-1)
    bits = jnp.dtype(f"int{jnp.finfo(ranks.dtype).bits}")
    return jnp.stack([jax.lax.bitcast_convert_type(lowest, bits), age.min(-1).astype(bits), place.astype(bits)])


def victims_of_all(claims: Int[Array, "m 3 b h"], capacities: Sequence[int]) -> tuple[Victim, ...]:
    """Return the victims of several layers over the slots of all devices, from the `claim` of each layer."""
    last = jnp.iinfo(jnp.int32).max
    lowest, age, place = jnp.moveaxis(jax.lax.all_gather(claims, SLOTS), 2, 0)
    lowest = jax.lax.bitcast_convert_type(lowest, jnp.dtype(f"float{jnp.iinfo(lowest.dtype).bits}"))
    age = jnp.where(lowest == lowest.min(0), age, last)
    oldest = age.min(0)
    place = jnp.where(age == oldest, place, last).min(0)
    victims = []
    for capacity, number, position in zip(capacities, place, oldest, strict=True):
        slot = number - jax.lax.axis_index(SLOTS) * capacity
        slot = jnp.where((slot >= 0) & (slot < capacity), slot, capacity).astype(jnp.int32)
        victims.append(Victim(slot, jnp.where(position == last, -1, position).astype(jnp.int32)))
    return tuple(victims)


def replace_slot_sharded(
    view: View, new: LayerTokens, victim: Victim, buffers: tuple[Any, ...], *, pairs: bool
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
    position = remembered_positions(position, new)
    return Evicted(pair.k, pair.v, position[..., None], new.layer)


def where_read(new: TokenBatch, after: PyTree, before: PyTree) -> PyTree:
    """Return `after` for rows that have read tokens, and `before` for the others, even if a score changes them."""
    reads = new.valid.any(1)

    def choose(new_leaf: Array, old_leaf: Array) -> Array:
        return jnp.where(reads.reshape(-1, *(1,) * (old_leaf.ndim - 1)), new_leaf, old_leaf)

    return jax.tree.map(choose, after, before)
