"""The only place that moves slots: rank, exchange, compress; and the bytes ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.types import KV, LayerCache, NewTokens, PyTree
from pallas_kernels import ranking
from pallas_kernels.evict import Protection, evict
from pallas_kernels.evict import exchange as exchange_slots

if TYPE_CHECKING:
    from kvjax.policies.base import Policy


def empty(
    policy: Policy, *, rows: int, heads: int, groups: int, slots: int, width: int, dtype: Any, layer: int
) -> LayerCache:
    """A layer's cache with nothing in it and no slot allowed yet."""
    kv = KV(jnp.zeros((rows, heads, slots, width), dtype), jnp.zeros((rows, heads, slots, width), dtype))
    slides = policy.positions == "cache" and policy.slides
    ranked = policy.positions == "cache" and not policy.slides
    nothing = jnp.zeros((rows, heads, 0, width), dtype)
    new = NewTokens(
        q=jnp.zeros((rows, heads, groups, 0, width), dtype),
        k=nothing,
        v=nothing,
        position=jnp.zeros((rows, 0), jnp.int32),
        token=jnp.zeros((rows, 0), jnp.int32),
        prompt_length=jnp.zeros(rows, jnp.int32),
        read=jnp.zeros(rows, jnp.int32),
        horizon=jnp.zeros(rows, jnp.int32),
        seed=jnp.zeros(rows, jnp.uint32),
        layer=layer,
    )
    state = policy.init(new)
    stats = jax.tree.map(
        lambda leaf: jnp.zeros((rows, heads, slots, *leaf.shape[3:]), leaf.dtype), policy.stats(new, state)
    )
    return LayerCache(
        kv=kv,
        position=jnp.full((rows, heads, slots), -1, jnp.int32),
        keep=jnp.zeros((rows, heads, slots), bool) if policy.special else None,
        order=jnp.zeros((rows, heads, slots), jnp.int32) if ranked else None,
        stats=stats,
        state=state,
        limit=jnp.zeros((rows, heads), jnp.int32),
        sinks=jnp.zeros((rows, heads, policy.sinks, width), dtype) if slides else None,
    )


def entries(policy: Policy, new: NewTokens, state: PyTree, kv: KV) -> dict[str, PyTree]:
    """Everything the cache stores of new tokens, each leaf [b h t ...]."""
    rows, heads, tokens = kv.k.shape[:3]
    keep = None
    if policy.special:
        protected = jnp.isin(new.token, jnp.asarray(policy.special))
        keep = jnp.broadcast_to(protected[:, None], (rows, heads, tokens))
    return {
        "kv": kv,
        "position": jnp.broadcast_to(new.position[:, None], (rows, heads, tokens)).astype(jnp.int32),
        "keep": keep,
        "stats": policy.stats(new, state),
    }


def append(cache: LayerCache, added: dict[str, PyTree]) -> LayerCache:
    """The cache with new slots behind its own, for a block of the prompt."""
    old = {name: getattr(cache, name) for name in added}
    joined = cache.replace(**jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=2), old, added))
    return _with_order(joined)


def _with_order(cache: LayerCache) -> LayerCache:
    if cache.order is None:
        return cache
    live = jnp.where(cache.position < 0, jnp.iinfo(jnp.int32).max, cache.position)
    return cache.replace(order=jnp.argsort(jnp.argsort(live, axis=-1), axis=-1).astype(jnp.int32))


def protection(policy: Policy, cache: LayerCache, new: NewTokens) -> Protection:
    """What may leave each head once the new tokens are read, and how many slots it may use."""
    return Protection(
        policy.sink_slots(cache.limit), policy.recent_slots(cache.limit), policy.allowed(cache.limit, new.read)
    )


def rank(policy: Policy, cache: LayerCache, new: NewTokens) -> Float[Array, "b h c"]:
    """Order of leaving: expired (-inf) < empty < finite scores < protected (+inf).

    Args:
        policy: gives the scores, sinks, recent window and protected tokens.
        cache: the layer's slots.
        new: what is being read; its newest token counts in the recent window.
    """
    sinks, recent, _ = (x[..., None] for x in protection(policy, cache, new))
    return ranking.rank(policy.score(cache, new), cache.position, new.newest[:, None, None], sinks, recent, cache.keep)


def last_resort(dtype: Any) -> float:
    """A score above all others: the slot leaves only where no slot competes and none is empty (see `competing`)."""
    return float(jnp.finfo(dtype).max) / 2


def exchange(policy: Policy, cache: LayerCache, new: NewTokens, kv: KV) -> tuple[LayerCache, KV, Int[Array, "b h 1"]]:
    """The cache with one new token per row in the slot that ranks lowest, and what was there.

    Args:
        policy: says which slot matters least.
        cache: the layer's slots.
        new: one token per row; a row of padding changes nothing.
        kv: the token's pair, as slots store it.

    Returns:
        The cache, and the pair that left [b h 1 d] with its position, -1 where none did.
    """
    bounds = protection(policy, cache, new)
    added = jax.tree.map(lambda leaf: leaf[:, :, 0], entries(policy, new, cache.state, kv))
    del added["position"]
    buffers = {name: getattr(cache, name) for name in added}
    slot = policy.victim(cache, new, bounds)
    slots = (cache.position, new.position[:, 0], buffers, added)
    if slot is None:
        scores, shrinks = policy.score(cache, new), policy.shrinks
        found = evict(scores, *slots, protection=bounds, keep=cache.keep, shrinks=shrinks)
    else:
        found = exchange_slots(slot, *slots)
    slot, left, taken, position, buffers = found
    written = _queued(cache, cache.replace(position=position, **buffers), slot)
    return written, jax.tree.map(lambda leaf: leaf[:, :, None], taken["kv"]), left[..., None]


def _queued(cache: LayerCache, written: LayerCache, slot: Int[Array, "b h"]) -> LayerCache:
    # The slot's old entry leaves the queue, those behind it move up, the new one is last.
    if cache.order is None:
        return written
    replaced = cache.position >= 0
    place = jnp.where(replaced, cache.order, cache.capacity)
    place = jnp.take_along_axis(place, jnp.minimum(slot, cache.capacity - 1)[..., None], axis=2)
    order = cache.order - (cache.order > place)
    last = (written.position >= 0).sum(-1, dtype=jnp.int32) - 1
    order = jnp.where(jnp.arange(cache.capacity) == slot[..., None], last[..., None], order)
    return written.replace(order=jnp.where((slot < cache.capacity)[..., None], order, cache.order))


def compress(policy: Policy, cache: LayerCache, new: NewTokens, capacity: int) -> tuple[LayerCache, Array]:
    """Keep the best `limit` slots of each head in buffers of `capacity` slots.

    Returns:
        The smaller cache, and which slots of the given one leave [b, h, c].
    """
    ranks, position = rank(policy, cache, new), cache.position
    # Expired slots leave even when there is room; empty ones are not worth a slot.
    worth = (position >= 0) & (ranks > -jnp.inf)
    ranks = jnp.where(worth, ranks, -jnp.inf)
    slots = jnp.broadcast_to(jnp.arange(position.shape[-1], dtype=jnp.int32), position.shape)
    # Of equal ranks the newest stay; but sinks, which all do, come first and in order.
    sinks = protection(policy, cache, new).sinks[..., None]
    age = jnp.where(position < sinks, position - jnp.iinfo(jnp.int32).max, -position)
    _, _, best = jax.lax.sort((-ranks, age, slots), num_keys=2)
    if best.shape[-1] < capacity:
        missing = capacity - best.shape[-1]
        # Repeats of the last slot, never kept: they lie beyond what the sort found worth keeping.
        best = jnp.concatenate([best, jnp.broadcast_to(best[..., -1:], (*best.shape[:2], missing))], axis=-1)
        real = jnp.arange(capacity) < capacity - missing
    else:
        best, real = best[..., :capacity], jnp.ones(capacity, bool)

    def gather(leaf: Array) -> Array:
        return jnp.take_along_axis(leaf, best.reshape(*best.shape, *(1,) * (leaf.ndim - 3)), axis=2)

    allowed = policy.allowed(cache.limit, new.read)[..., None]
    kept = real & (jnp.arange(capacity) < allowed) & gather(worth)
    rows, heads = position.shape[:2]
    staying = jnp.zeros(position.shape, bool)
    staying = staying.at[jnp.arange(rows)[:, None, None], jnp.arange(heads)[None, :, None], best].max(kept)
    smaller = cache.replace(
        kv=jax.tree.map(gather, cache.kv),
        position=jnp.where(kept, gather(position), -1),
        keep=None if cache.keep is None else gather(cache.keep) & kept,
        stats=jax.tree.map(gather, cache.stats),
    )
    return _with_order(smaller), (position >= 0) & ~staying


def drop(cache: LayerCache, leaving: Bool[Array, "b h c"]) -> LayerCache:
    """The cache with some of its slots made empty."""
    keep = None if cache.keep is None else cache.keep & ~leaving
    return _with_order(cache.replace(position=jnp.where(leaving, -1, cache.position), keep=keep))


def fetch(policy: Policy, cache: LayerCache) -> LayerCache:
    """The cache with its scores where attention is computed."""
    return _moved(cache, jax.memory.Space.Device) if policy.offloads else cache


def stow(policy: Policy, cache: LayerCache) -> LayerCache:
    """The cache as it waits for the next token: scores in host memory, for policies that offload them."""
    return _moved(cache, jax.memory.Space.Host) if policy.offloads else cache


def _moved(cache: LayerCache, space: Any) -> LayerCache:
    return cache.replace(stats=jax.tree.map(lambda leaf: jax.device_put(leaf, space), cache.stats))


def allocated_bytes(caches: PyTree) -> int:
    """Bytes of the arrays that make up caches, whatever they store: pairs, positions, scores, codes, states."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))
