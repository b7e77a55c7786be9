"""Ranks of the slots of whole heads: which tokens stay if several are evicted together."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.evict import Numbers, last_resort, remembered_positions, scores, slots_at
from kvjax.policies.policy import Policy
from kvjax.policies.rankings import as_numbers
from kvjax.policies.residual import Residual
from kvjax.types import Evicted, LayerTokens, PyTree, View, restored
from pallas_kernels import ranking

V = TypeVar("V", bound=View)

TOKEN_BLOCK = 64
"""Evicted tokens that are decoded together."""


def rank(policy: Policy, view: View, new: LayerTokens, numbers: Numbers = as_numbers) -> Float[Array, "b h c"]:
    """Return ranks; the lowest is evicted first: expired (-inf) < empty < scores < protected < sinks (+inf)."""
    score, protected, _ = scores(policy, view, new, numbers)
    newest, sinks, recent = new.newest[:, None, None], protected.sinks[..., None], protected.recent[..., None]
    return ranking.rank(score, view.position, newest, sinks, recent, protected.keep)


def with_newest(ranks: Float[Array, "b h c"], position: Int[Array, "b h c"], new: LayerTokens) -> Float[Array, "b h c"]:
    """Return ranks that keep the newest token as long as sinks."""
    newest = (position == new.newest[:, None, None]) & (ranks > -jnp.inf)
    return jnp.where(newest, jnp.inf, ranks)


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


def shrunk(policy: Policy, view: V, new: LayerTokens) -> V:
    """Evict the lowest-ranked slots of rows whose slot limit has just fallen; the new token finds an empty slot."""
    before = jnp.maximum(new.read - 1, new.prompt_length)
    fewer = slots_at(policy, view.limit, new) < slots_at(policy, view.limit, new, before)
    fewer &= new.valid[:, :1]

    # The branch returns only masks and the order of slots: XLA would copy a returned cache at every step.
    def evict_several() -> Any:
        leaving = best_slots(policy, view, new, view.capacity * new.spread.slots, reserved=1)[2]
        leaving &= fewer[..., None]
        after = policy.codec.settle(view.replace(position=jnp.where(leaving, -1, view.position)), new)
        return leaving, after.slots.codec, after.state.codec

    def evict_none() -> Any:
        return jnp.zeros(view.position.shape, bool), view.slots.codec, view.state.codec

    leaving, order, codec_state = jax.lax.cond(fewer.any(), evict_several, evict_none)
    state = view.state.replace(codec=codec_state)
    if (residual := policy.residual) is not None:
        folded = functools.partial(fold_evicted, residual, view, new, leaving)
        state = state.replace(residual=jax.lax.cond(fewer.any(), folded, lambda: state.residual))
    position = jnp.where(leaving, -1, view.position)
    return view.replace(position=position, slots=view.slots.replace(codec=order), state=state)


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
