"""Ranking of slots by a policy, and the order in which caches evict tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvjax.policies.policy import Policy
from kvjax.policies.protection import Protected
from kvjax.policies.rankings import Ranking, as_numbers
from kvjax.policies.residual import Residual
from kvjax.types import SLOTS, Evicted, LayerTokens, PyTree, View, restored
from pallas_kernels import ranking
from pallas_kernels.attention import Partial
from pallas_kernels.ranking import EvictionRules

TOKEN_BLOCK = 64
"""Evicted tokens that are decoded together."""


Numbers = Callable[[Ranking, View], Float[Array, "b h c"]]
"""Scores of a ranking: `as_numbers` or `between_heads`."""


class Attended(NamedTuple):
    """Attention over a layer's slots and evicted pairs, with the statistics that the policy requested."""

    partial: Partial
    stats: Any
    """Statistics in the storage's own format, for its `update_slot`."""


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
        values, protected = numbers(ranking, view), policy.protection.guard(view, new)
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


def rank(policy: Policy, view: View, new: LayerTokens, numbers: Numbers = as_numbers) -> Float[Array, "b h c"]:
    """Return ranks; the lowest is evicted first: expired (-inf) < empty < scores < protected < sinks (+inf)."""
    score, protected, _ = scores(policy, view, new, numbers)
    newest, sinks, recent = new.newest[:, None, None], protected.sinks[..., None], protected.recent[..., None]
    return ranking.rank(score, view.position, newest, sinks, recent, protected.keep)


def with_newest(ranks: Float[Array, "b h c"], position: Int[Array, "b h c"], new: LayerTokens) -> Float[Array, "b h c"]:
    """Return ranks that keep the newest token as long as sinks."""
    newest = (position == new.newest[:, None, None]) & (ranks > -jnp.inf)
    return jnp.where(newest, jnp.inf, ranks)


class Victim(NamedTuple):
    """Slot that a new token takes, chosen among all devices that share a head's slots."""

    slot: Int[Array, "b h"]
    """Number of the slot on this device; the capacity if another device has the slot."""
    position: Int[Array, "b h"]
    """Position of the token in the slot; -1 if the slot is empty."""


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
    ranks = ranking.rank(scores, position, new.position[:, :1, None], sinks, recent, keep)
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


def best_first(
    ranks: Float[Array, "b h c"], position: Int[Array, "b h c"], sinks: Int[Array, "b h"] | Int[Array, ""]
) -> tuple[Int[Array, "b h c"], Int[Array, "b h"]]:
    """Return the slots from the most to the least important one, and how many of them are worth keeping.

    Expired and empty slots are not worth keeping, even if there are free slots. Among equal ranks the newest tokens
    come first. Sinks come before all others, in the order of the text.
    """
    worth = (position >= 0) & (ranks > -jnp.inf)
    slots = jnp.broadcast_to(jnp.arange(position.shape[-1], dtype=jnp.int32), position.shape)
    age = jnp.where(position < sinks[..., None], position - jnp.iinfo(jnp.int32).max, -position)
    _, _, order = jax.lax.sort((jnp.where(worth, -ranks, jnp.inf), age, slots), num_keys=2)
    return order, worth.sum(-1, dtype=jnp.int32)


def slots_to_keep(
    policy: Policy, view: View, new: LayerTokens, reserved: int = 0
) -> tuple[Int[Array, "b h c"], Int[Array, "b h"]]:
    """Return the slots of whole heads from the most to the least important one, and how many of them stay.

    `reserved` slots stay free for new tokens.
    """
    score, protected = policy.scores_and_protection(view, new)
    ranks, position, score = map(new.spread.all_slots, (rank(policy, view, new), view.position, score))
    usable, quota = slots_at(policy, view.limit, new) - reserved, protected.quota
    # The newest token gets a slot, even if protected tokens fill the head, as in a decode step.
    full = (ranks >= ranking.protected(ranks.dtype)).sum(-1, keepdims=True) >= usable[..., None]
    ranks = jnp.where(full, with_newest(ranks, position, new), ranks)
    order, count = best_first(ranks, position, protected.sinks)
    if quota is not None:
        worth = (position >= 0) & (ranks > -jnp.inf)
        competes = (worth & (ranks < last_resort(ranks.dtype))).astype(jnp.int32)
        score = jnp.where(worth if quota.among_all else competes, score, -jnp.inf)
        count += sum_of_top(score, position, competes, quota.limit) - competes.sum(-1)
    return order, jnp.minimum(count, usable)


def best_slots(
    policy: Policy, view: View, new: LayerTokens, capacity: int, reserved: int = 0
) -> tuple[Array, Array, Bool[Array, "b h c"]]:
    """Choose the slots of each head to keep, up to its limit, in buffers of `capacity` slots; see `slots_to_keep`.

    Rows without new tokens keep their slots in place.

    Returns:
        The best slots of whole heads [b h capacity], a mask of those that are kept, and a mask of this device's slots
        that are evicted.
    """
    position = new.spread.all_slots(view.position)
    rows, heads, slots = position.shape
    best, count = slots_to_keep(policy, view, new, reserved)
    idle = ~new.valid.any(1)[:, None, None]
    best = jnp.where(idle, jnp.arange(slots, dtype=jnp.int32), best)
    count = jnp.where(idle[..., 0], slots, count)
    missing = max(0, capacity - slots)
    if missing:
        # Pad with repeats of the last slot, which `valid` excludes.
        best = jnp.concatenate([best, jnp.broadcast_to(best[..., -1:], (rows, heads, missing))], axis=-1)
    best = best[..., :capacity]
    place = jnp.arange(capacity)
    valid = (place < count[..., None]) & (place < capacity - missing)
    valid &= gather(position, best) >= 0
    staying = jnp.zeros(position.shape, bool)
    staying = staying.at[jnp.arange(rows)[:, None, None], jnp.arange(heads)[None, :, None], best].max(valid)
    return best, valid, new.spread.own_slots((position >= 0) & ~staying)


def sum_of_top(
    score: Float[Array, "b h c"], position: Int[Array, "b h c"], value: Array, k: Int[Array, "b #h"]
) -> Array:
    """Sum the values [b h c] of the slots with the `k` highest scores: [b h].

    Among equal scores the newest tokens count first. Slots that score -inf never count.
    """
    ranked, _, value = jax.lax.sort((-score, -position, value), num_keys=2)
    counts = (jnp.arange(score.shape[-1]) < k[..., None]) & (ranked < jnp.inf)
    return jnp.where(counts, value, 0).sum(-1, dtype=value.dtype)


def gather(leaf: Array, slots: Int[Array, "b h m"]) -> Array:
    """Gather the entries of some slots of a buffer [b h c ...]."""
    return jnp.take_along_axis(leaf, slots.reshape(*slots.shape, *(1,) * (leaf.ndim - 3)), axis=2)


def fold_evicted(residual: Residual, view: View, new: LayerTokens, leaving: Bool[Array, "b h c"]) -> PyTree:
    """Return a residual's state with the `leaving` slots of a layer added, decoding one block of slots at a time.

    Tokens outside the layer's window are not added.
    """
    position = remembered_positions(jnp.where(leaving, view.position, -1), new)
    size = min(TOKEN_BLOCK, view.capacity)
    padding = -view.capacity % size

    def blocks(leaf: Array, fill: int = 0) -> Array:
        leaf = jnp.pad(leaf, [(0, 0), (0, 0), (0, padding)] + [(0, 0)] * (leaf.ndim - 3), constant_values=fill)
        return jnp.moveaxis(leaf.reshape(*leaf.shape[:2], -1, size, *leaf.shape[3:]), 2, 0)

    def add(state: PyTree, block: Any) -> tuple[PyTree, None]:
        kv, position = block
        pair = restored(new.config.rope, kv, position, view.state.codec, new.k.dtype)
        return residual.absorb(state, Evicted(pair.k, pair.v, position, new.layer)), None

    parts = jax.tree.map(blocks, view.kv), blocks(position, -1)
    return jax.lax.scan(add, view.state.residual, parts)[0]


def where_read(new: LayerTokens, after: PyTree, before: PyTree) -> PyTree:
    """Return `after` for rows that have read tokens, and `before` for the others, even if a score changes them."""
    reads = new.valid.any(1)

    def choose(new_leaf: Array, old_leaf: Array) -> Array:
        return jnp.where(reads.reshape(-1, *(1,) * (old_leaf.ndim - 1)), new_leaf, old_leaf)

    return jax.tree.map(choose, after, before)
