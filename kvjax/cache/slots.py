"""What a cache asks of whoever decides, and the order in which tokens leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvjax.policies.policy import Policy
from kvjax.policies.protection import Protected
from kvjax.types import SLOTS, Evicted, LayerConfig, New, PyTree, View, restored
from pallas_kernels import ranking
from pallas_kernels.ranking import Protection

TOKEN_BLOCK = 64
"""Evicted tokens that are decoded at once."""


class Attended(NamedTuple):
    """What a storage tells of attention over a layer."""

    out: Float[Array, "b h g t e"]
    answers: Any
    """As the storage has them, for its `fold`."""


def last_resort(dtype: DTypeLike) -> float:
    """A score above all others: the slot leaves only where no slot competes and none is empty."""
    return float(jnp.finfo(dtype).max) / 2


def scores(policy: Policy, view: View, new: New) -> tuple[Float[Array, "b h c"], Protected]:
    """How much each slot matters, last resorts above all others, and what protects it.

    What the layer's own window has passed is expired, protected or not: no later query sees it. So a layer whose heads
    may use as many slots as its window is wide holds exactly that window, under any policy.
    """
    with jax.named_scope("scores"):
        found, guard = policy.standing(view, new)
    if guard.last is not None:
        found = jnp.where(guard.last, last_resort(found.dtype), found)
    if windowed(new):
        found = jnp.where(in_window(view.position, new), found, -jnp.inf)
    return found, guard


def windowed(new: New) -> bool:
    """Whether the layer has a window of its own."""
    return new.config is not None and new.config.window is not None


def in_window(position: Int[Array, "b h *c"], new: New) -> Bool[Array, "b h *c"]:
    """Which positions the newest token still sees; all of them in a layer without a window."""
    if new.config is None or new.config.window is None:
        return jnp.ones(position.shape, bool)
    newest = new.newest.reshape(-1, *(1,) * (position.ndim - 1))
    return position > newest - new.config.window


def remembered_positions(position: Int[Array, "b h *c"], new: New) -> Int[Array, "b h *c"]:
    """Positions of what leaves, as `Evicted` has them: -1 for what a layer's window has passed."""
    return jnp.where(in_window(position, new), position, -1)


def room(
    policy: Policy, limit: Int[Array, "b h"], new: New, length: Int[Array, " b"] | None = None
) -> Int[Array, "b h"]:
    """Slots that may be used in a text of so many tokens, or as long as it is; all of them where a window bounds it."""
    found = policy.room(limit, new.length if length is None else length)
    if new.config is None or not new.config.local:
        return found
    return jnp.where(new.config.bounds(new.end)[:, None], limit, found)


def rank(policy: Policy, view: View, new: New) -> Float[Array, "b h c"]:
    """Order of leaving: expired (-inf) < empty < scores < protected < sinks (+inf)."""
    found, guard = scores(policy, view, new)
    newest, sinks, recent = new.newest[:, None, None], guard.sinks[..., None], guard.recent[..., None]
    return ranking.rank(found, view.position, newest, sinks, recent, guard.keep)


def with_newest(ranks: Float[Array, "b h c"], position: Int[Array, "b h c"], new: New) -> Float[Array, "b h c"]:
    """Return ranks in which the newest token leaves as late as sinks."""
    newest = (position == new.newest[:, None, None]) & (ranks > -jnp.inf)
    return jnp.where(newest, jnp.inf, ranks)


class Victim(NamedTuple):
    """What a new token takes among the slots of all devices that share a head's."""

    slot: Int[Array, "b h"]
    """Here; beyond all that are here where another device has it."""
    position: Int[Array, "b h"]
    """Of the token in it; -1 where it is empty."""


def claim(
    scores: Float[Array, "b h c"] | None,
    position: Int[Array, "b h c"],
    new: New,
    bounds: Protection,
    keep: Bool[Array, "b h c"] | None,
    shrinks: bool,
) -> Int[Array, "3 b h"]:
    """Which of its slots each head would give to a new token, as one of the devices that share them sees it.

    Args:
        scores: how much each slot here matters; None where the oldest leaves first.
        position: the token in each of them.
        new: one token per row.
        bounds: of whole heads.
        keep: slots that never leave, or None.
        shrinks: as for `pallas_kernels.ranking.victim`.

    Returns:
        The slot's rank, as bits, the position of its token and its number among all slots.
    """
    last, capacity = jnp.iinfo(jnp.int32).max, position.shape[-1]
    slot = jax.lax.axis_index(SLOTS) * capacity + jnp.arange(capacity, dtype=jnp.int32)
    sinks, recent, limit = (bound[..., None] for bound in bounds)
    ranks = ranking.rank(scores, position, new.position[:, :1, None], sinks, recent, keep)
    live = position >= 0
    usable = slot < limit
    if shrinks:
        usable = live | (new.spread.over_slots(live.sum(-1, keepdims=True, dtype=jnp.int32)) < limit)
    ranks = jnp.where(usable, ranks, jnp.inf)
    least = ranks.min(-1)
    age = jnp.where(usable & (ranks == least[..., None]), position, last)
    place = jnp.where(age == age.min(-1, keepdims=True), slot, last).min(-1)
    bits = jnp.dtype(f"int{jnp.finfo(ranks.dtype).bits}")
    return jnp.stack([jax.lax.bitcast_convert_type(least, bits), age.min(-1).astype(bits), place.astype(bits)])


def victims_of_all(claims: Int[Array, "m 3 b h"], capacities: Sequence[int]) -> tuple[Victim, ...]:
    """`pallas_kernels.ranking.victim` among the slots of all devices, for some layers at once.

    Args:
        claims: of this device, for each layer.
        capacities: slots of each layer's heads that are here.
    """
    last = jnp.iinfo(jnp.int32).max
    least, age, place = jnp.moveaxis(jax.lax.all_gather(claims, SLOTS), 2, 0)
    least = jax.lax.bitcast_convert_type(least, jnp.dtype(f"float{jnp.iinfo(least.dtype).bits}"))
    age = jnp.where(least == least.min(0), age, last)
    oldest = age.min(0)
    place = jnp.where(age == oldest, place, last).min(0)
    found = []
    for capacity, number, position in zip(capacities, place, oldest, strict=True):
        slot = number - jax.lax.axis_index(SLOTS) * capacity
        slot = jnp.where((slot >= 0) & (slot < capacity), slot, capacity).astype(jnp.int32)
        found.append(Victim(slot, jnp.where(position == last, -1, position).astype(jnp.int32)))
    return tuple(found)


def best_first(
    ranks: Float[Array, "b h c"], position: Int[Array, "b h c"], sinks: Int[Array, "b h"] | Int[Array, ""]
) -> tuple[Int[Array, "b h c"], Int[Array, "b h"]]:
    """Slots from the most to the least important one, and how many of them are worth keeping.

    Expired slots leave even when there is room, empty ones are not worth a slot. Of equals the newest stay; sinks come
    first and in order.
    """
    worth = (position >= 0) & (ranks > -jnp.inf)
    slots = jnp.broadcast_to(jnp.arange(position.shape[-1], dtype=jnp.int32), position.shape)
    age = jnp.where(position < sinks[..., None], position - jnp.iinfo(jnp.int32).max, -position)
    _, _, order = jax.lax.sort((jnp.where(worth, -ranks, jnp.inf), age, slots), num_keys=2)
    return order, worth.sum(-1, dtype=jnp.int32)


def chosen(policy: Policy, view: View, new: New) -> tuple[Int[Array, "b h c"], Int[Array, "b h"]]:
    """Slots of whole heads from the most to the least important one, and how many of them stay."""
    score, guard = policy.standing(view, new)
    ranks, position, score = map(new.spread.all_slots, (rank(policy, view, new), view.position, score))
    # A step gives the token that it reads a slot, even where protected ones fill the head; so does a block.
    full = (ranks >= ranking.protected(ranks.dtype)).sum(-1, keepdims=True) >= room(policy, view.limit, new)[..., None]
    ranks = jnp.where(full, with_newest(ranks, position, new), ranks)
    order, count = best_first(ranks, position, guard.sinks)
    places = policy.competing(view, new)
    if places is not None:
        worth = (position >= 0) & (ranks > -jnp.inf)
        competes = (worth & (ranks < last_resort(ranks.dtype))).astype(jnp.int32)
        score = jnp.where(worth if places.among_all else competes, score, -jnp.inf)
        count += sum_of_most(score, position, competes, places.most) - competes.sum(-1)
    return order, jnp.minimum(count, room(policy, view.limit, new))


def sum_of_most(
    score: Float[Array, "b h c"], position: Int[Array, "b h c"], value: Array, most: Int[Array, "b #h"]
) -> Array:
    """The values [b h c] of the `most` highest scores summed: [b h]; of equals the newest count, -inf never."""
    ranked, _, value = jax.lax.sort((-score, -position, value), num_keys=2)
    counts = (jnp.arange(score.shape[-1]) < most[..., None]) & (ranked < jnp.inf)
    return jnp.where(counts, value, 0).sum(-1, dtype=value.dtype)


def gather(leaf: Array, slots: Int[Array, "b h m"]) -> Array:
    """The entries of some slots of a buffer [b h c ...]."""
    return jnp.take_along_axis(leaf, slots.reshape(*slots.shape, *(1,) * (leaf.ndim - 3)), axis=2)


def fold_evicted(
    absorb: Callable[[PyTree, Evicted], PyTree],
    remembered: PyTree,
    policy: Policy,
    config: LayerConfig,
    view: View,
    new: New,
    leaving: Bool[Array, "b h c"],
) -> PyTree:
    """What a residual remembers after some slots of a layer leave, decoded a block of them at a time.

    Args:
        absorb: the residual's.
        remembered: its state.
        policy: of the policy.
        config: of the layer.
        view: the slots, before they leave.
        new: what is being read.
        leaving: which of them do; what the layer's window has passed is not remembered.
    """
    position = remembered_positions(jnp.where(leaving, view.position, -1), new)
    size = min(TOKEN_BLOCK, view.capacity)
    padding = -view.capacity % size

    def blocks(leaf: Array, fill: int = 0) -> Array:
        leaf = jnp.pad(leaf, [(0, 0), (0, 0), (0, padding)] + [(0, 0)] * (leaf.ndim - 3), constant_values=fill)
        return jnp.moveaxis(leaf.reshape(*leaf.shape[:2], -1, size, *leaf.shape[3:]), 2, 0)

    def add(remembered: PyTree, block: Any) -> tuple[PyTree, None]:
        kv, position = block
        pair = restored(config.rope, kv, position, view.state.codec, new.k.dtype)
        return absorb(remembered, Evicted(pair.k, pair.v, position, new.layer, new.kernels)), None

    parts = jax.tree.map(blocks, view.kv), blocks(position, -1)
    return jax.lax.scan(add, remembered, parts)[0]


def nothing_evicted(new: New) -> Evicted:
    """What has left for some new tokens where nobody asks for it."""
    nowhere = jnp.full(new.k.shape[:3], -1, jnp.int32)
    return Evicted(jnp.zeros_like(new.k), jnp.zeros_like(new.v), nowhere, new.layer, new.kernels)


def where_read(new: New, after: PyTree, before: PyTree) -> PyTree:
    """What is remembered after a reading: rows that have read nothing do not change, whatever a score makes of it."""
    reads = new.valid.any(1)

    def choose(new_leaf: Array, old_leaf: Array) -> Array:
        return jnp.where(reads.reshape(-1, *(1,) * (old_leaf.ndim - 1)), new_leaf, old_leaf)

    return jax.tree.map(choose, after, before)
