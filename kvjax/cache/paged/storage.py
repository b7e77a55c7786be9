"""Eviction and attention over pages, whose heads have caches of individual sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import ranks
from kvjax.cache.attention import with_evicted
from kvjax.cache.evict import Attended, evicted_pairs, last_resort, slots_at
from kvjax.cache.paged.pages import LayerPages, owned, write_pages
from kvjax.cache.paged.stats import PageStats, check_asks, of_pages, page_stats
from kvjax.policies.base import label_of
from kvjax.policies.policy import Policy
from kvjax.types import KV, OF_HEADS, OF_POOL, Evicted, LayerTokens, PyTree, View
from pallas_kernels.attention import LowRank, Partial
from pallas_kernels.evict.reference import after_reading
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.ranking import protected

NO_SLOT = jnp.iinfo(jnp.int32).max
"""Slot number that means no slot; larger than all others."""

Choice = tuple[Float[Array, " o"], Int[Array, " o"], Int[Array, " o"]]
"""Rank, position and slot of one token per owner."""

OfPages = Callable[[View, LayerTokens, Array | int], Float[Array, "p s"]]
"""Gives a number for each slot of a block of pages: the block as a view, its tokens, and its first page."""


class Candidates(NamedTuple):
    """Eviction candidates of each head."""

    fallback: Choice
    """Lowest-ranked slot outside the competition: empty, or with a token that is evicted last or never."""
    lowest: Choice
    """Lowest-ranked slot that competes."""
    overflow: Int[Array, " o"]
    """Number of tokens over the quota: the lowest-ranked one is evicted if it is above 0, and more if above 1."""


class Pages(LayerPages):
    """Slots on pages: each head of the layer has slots of its own number."""

    def write_token(self, policy: Policy, new: LayerTokens, *, pairs: bool, **options: Any) -> tuple[Pages, Evicted]:
        """Write one new token per row into the lowest-ranked slot of each head; see `SlotCache.write`."""
        cache, candidates = self._shrunk(policy, new)
        state = policy.codec.begin(cache, new).state
        cache = cache.with_state(codec=state.codec)
        slot = _victim(candidates, new)
        entries: dict[str, PyTree] = {"kv": policy.codec.encode(new, state.codec), "slots": policy.slots(new, state)}
        entries["position"] = jnp.broadcast_to(new.position[:, None], new.k.shape[:3]).astype(jnp.int32)
        kv, position, order = contents = cache._contents(slot, pairs)
        cache = cache._write(after_reading(slot, contents), entries)
        if order is not None:
            cache = cache._reordered(policy, new, order, position)
        return cache, evicted_pairs(state, new, kv, position)

    def _shrunk(self, policy: Policy, new: LayerTokens) -> tuple[Pages, Candidates]:
        """Evict tokens until each head must evict at most one more, and return the candidates for it."""
        scores = self._of_slots(policy, new, lambda policy, view, new: policy.scores_and_protection(view, new)[0])
        rankings = self._of_slots(policy, new, ranks.rank), scores
        start = self._candidates(policy, new, *rankings)
        if not policy.may_shrink:
            return self, start

        def leaving(candidates: Candidates) -> Int[Array, "b h"]:
            slot = jnp.where(candidates.overflow > 1, candidates.lowest[2], NO_SLOT).reshape(new.k.shape[:2])
            return jnp.where(new.valid[:, :1], slot, NO_SLOT)

        # The loop carries only positions, the order of slots and states: XLA would copy a carried pool.
        def carried(cache: Pages) -> tuple[PyTree, ...]:
            pool, state = cache.linked, cache.state
            return pool.position, pool.slots.codec, state.codec, state.residual

        def with_carried(position: Array, order: PyTree, codec: PyTree, residual: PyTree) -> Pages:
            pool = self.linked
            pool = pool.replace(position=position, slots=pool.slots.replace(codec=order))
            return self.replace(pool=pool).with_state(codec=codec, residual=residual)

        def evict_one(carry: tuple[tuple[PyTree, ...], Candidates]) -> tuple[tuple[PyTree, ...], Candidates]:
            cache, slot = with_carried(*carry[0]), leaving(carry[1])
            (kv, position, order), state = cache._contents(slot, policy.residual is not None), cache.state
            if policy.residual is not None:
                evicted = evicted_pairs(state, new, kv, position)
                cache = cache.with_state(residual=policy.residual.absorb(state.residual, evicted))
            cache = cache._write(slot, {"position": jnp.full_like(slot, -1)})
            if order is not None:
                cache = cache._reordered(policy, new, order, position, arrives=False)
            return carried(cache), cache._candidates(policy, new, *rankings)

        after, candidates = jax.lax.while_loop(
            lambda carry: (leaving(carry[1]) < NO_SLOT).any(), evict_one, (carried(self), start)
        )
        return with_carried(*after), candidates

    def _contents(self, slot: Int[Array, "b h"], pairs: bool) -> tuple[KV | None, Int[Array, "b h"], Any]:
        # Returns the pair in each slot, if requested, its position, and its place in the order if the codec tracks it.
        pool = self.linked
        kv = pool.at(pool.kv, slot) if pairs else None
        position = jnp.where(slot < pool.position.size, pool.at(pool.position, slot), -1)
        return kv, position, pool.at(pool.slots.codec, slot)

    def _write(self, slot: Int[Array, "b h"], entries: dict[str, PyTree]) -> Pages:
        return self.replace(pool=self.linked.write(slot, entries))

    def _with_slots(self, **states: PyTree) -> Pages:
        pool = self.linked
        return self.replace(pool=pool.replace(slots=pool.slots.replace(**states)))

    def _reordered(
        self, policy: Policy, new: LayerTokens, order: Array, position: Array, *, arrives: bool = True
    ) -> Pages:
        codec = policy.codec

        def reorder(orders: Array, at: Array, valid: Array) -> Array:
            view, tokens, owner = self._with_slots(codec=orders).view(new, at, len(valid))
            after = codec.order_after(view, tokens, order.reshape(-1, 1)[owner], position.reshape(-1, 1)[owner])
            return write_pages(orders, after[:, 0], at, valid)

        cache = self._with_slots(codec=self.over_pages(reorder, self.linked.slots.codec))
        return cache.with_state(codec=codec.count_after(self.state.codec, new, position, arrives=arrives))

    def _candidates(self, policy: Policy, new: LayerTokens, rank: OfPages, score: OfPages) -> Candidates:
        owners, pool = new.k.shape[0] * new.k.shape[1], self.linked
        limit = slots_at(policy, self.limit, new).reshape(-1)
        quota = policy.protection.guard(self.without_tokens(), new).quota
        # Heads that grow between two evictions have more slots than they may use at their smallest.
        grows, allocated = policy.evict_every > 1, self.limit.reshape(-1) + pool.spare
        if grows and quota is not None:
            raise ValueError(f"{label_of(policy.protection)} has a quota at each token; use evict_every=1.")
        max_slots = allocated if grows else limit
        size = pool.page_size

        def usable(at: Array, valid: Array, owner: Array) -> Bool[Array, "p s"]:
            slot = jax.lax.dynamic_slice_in_dim(pool.first, at, len(valid))[:, None] + jnp.arange(size, dtype=jnp.int32)
            return valid[:, None] & (slot < max_slots[owner][:, None])

        def compare(carry: Any, at: Array, valid: Array) -> Any:
            view, tokens, owner = self.view(new, at, len(valid))
            of_slots, position = rank(view, tokens, at), view.position[:, 0]
            mask = usable(at, valid, owner)
            number = (at + jnp.arange(len(valid), dtype=jnp.int32))[:, None] * size + jnp.arange(size, dtype=jnp.int32)
            members = owned(owner, valid, owners)
            if quota is None and not grows:
                return _better(carry[0], _lowest(mask, of_slots, position, number, members)), *carry[1:]
            eligible = of_slots > -jnp.inf if grows else of_slots < last_resort(of_slots.dtype)
            competes = mask & (position >= 0) & eligible
            count = jnp.where(members, competes.sum(-1, dtype=jnp.int32), 0).sum(1, dtype=jnp.int32)
            lowest = _better(carry[1], _lowest(competes, of_slots, position, number, members))
            fallback = _better(carry[0], _lowest(mask & ~competes, of_slots, position, number, members))
            return fallback, lowest, carry[2] + count

        kind = jax.eval_shape(lambda: rank(*self.view(new, 0, 1)[:2], 0)).dtype
        zero, no_slot = jnp.zeros(owners, jnp.int32), jnp.full(owners, NO_SLOT, jnp.int32)
        none = jnp.full(owners, jnp.inf, kind), no_slot, no_slot
        fallback, lowest, count = self.over_pages(compare, (none, none, zero))
        if grows:
            return Candidates(fallback, lowest, count - (limit - 1))
        if quota is None:
            return Candidates(fallback, lowest, zero)
        if not quota.among_all:
            return Candidates(fallback, lowest, count - quota.limit.reshape(-1))

        def count_higher(count: Array, at: Array, valid: Array) -> Array:
            view, tokens, owner = self.view(new, at, len(valid))
            scores, position = score(view, tokens, at), view.position[:, 0]
            low, age = lowest[0][owner][:, None], lowest[1][owner][:, None]
            higher = (scores > low) | ((scores == low) & (position > age))
            higher &= usable(at, valid, owner) & (position >= 0)
            members = owned(owner, valid, owners)
            return count + jnp.where(members, higher.sum(-1, dtype=jnp.int32), 0).sum(1, dtype=jnp.int32)

        place = self.over_pages(count_higher, zero) + 1
        return Candidates(fallback, lowest, jnp.where(lowest[2] < NO_SLOT, place - quota.limit.reshape(-1), 0))

    def _of_slots(
        self, policy: Policy, new: LayerTokens, compute: Callable[[Policy, View, LayerTokens], Float[Array, "b h c"]]
    ) -> OfPages:
        """Return a function that gives a number for each slot of a block of pages.

        A score that compares the slots of a head with each other is computed once, for all heads side by side. Slots
        that are emptied afterwards have the lowest number.
        """
        if not policy.score.requires.whole_heads:
            return lambda view, tokens, at: compute(policy, view, tokens)[:, 0]
        slot, exists = self.slot_numbers()
        of_heads = compute(policy, self.unpacked(), new)
        pool = self.linked
        numbers = jnp.zeros(pool.position.shape, of_heads.dtype).reshape(-1)
        numbers = numbers.at[jnp.where(exists, slot, numbers.size)].set(of_heads, unique_indices=True, mode="drop")
        numbers = numbers.reshape(pool.position.shape)

        def of_pages(view: View, tokens: LayerTokens, at: Array | int) -> Array:
            block = jax.lax.dynamic_slice_in_dim(numbers, at, len(view.position))
            return jnp.where(view.position[:, 0] >= 0, block, jnp.finfo(block.dtype).min)

        return of_pages

    def attend_token(
        self, policy: Policy, new: LayerTokens, requests: PyTree, evicted: LowRank | Partial | None
    ) -> tuple[Pages, Attended]:
        assert policy.selection is None
        check_asks(policy, requests)
        pool = self.linked
        view = View(self.limit, self.state, pool.kv, pool.position, pool.slots)
        operands = policy.codec.operands(view, new, places=pool.max_slots)
        new, operands = operands.with_bias(new, policy.slot_bias(view))
        attention = paged_attention(
            operands.q[:, :, :, 0],
            *operands.stored,
            pool.position,
            pool.owner,
            self.pages,
            new.position[:, 0],
            new.config.spec,
            places=operands.token_places,
            logits=pool.logits,
            layers=pool.layers,
        )
        cache = self.replace(pool=pool.replace(logits=attention.logits))
        return cache, Attended(with_evicted(attention.partial, evicted), page_stats(self, new, requests, attention))

    def update_slots(self, policy: Policy, requests: PyTree, stats: PageStats, new: LayerTokens) -> Pages:
        """Update scores with the requested statistics, one block of pages at a time."""

        def update(score: PyTree, at: Array, valid: Array) -> PyTree:
            view, tokens, owner = self._with_slots(score=score).view(new, at, len(valid))
            after = policy.score.update_slot(of_pages(requests, stats, view, tokens, at, owner, new), view, tokens)
            reads = valid & tokens.valid[:, 0]
            return jax.tree.map(lambda buffer, leaf: write_pages(buffer, leaf[:, 0], at, reads), score, after)

        return self._with_slots(score=self.over_pages(update, self.linked.slots.score))


Pages.specs = Pages(OF_HEADS, OF_HEADS, pages=OF_POOL)


def _victim(candidates: Candidates, new: LayerTokens) -> Int[Array, "b h"]:
    """Return the slot that the next token takes in each head, numbered over the whole pool; `NO_SLOT` for padding.

    If a quota bounds the competing tokens, the lowest-ranked one is evicted when they exceed it. Otherwise the new
    token takes an empty slot, else that of the oldest token that is evicted last, else that of the lowest-ranked token.
    """
    fallback, lowest, overflow = candidates
    competes = (overflow > 0) | ((fallback[0] >= protected(fallback[0].dtype)) & (lowest[2] < NO_SLOT))
    slot = jnp.where(competes, lowest[2], fallback[2]).reshape(new.k.shape[:2])
    return jnp.where(new.valid[:, :1], slot, NO_SLOT)


def _lowest(
    allowed: Bool[Array, "p s"], ranks: Array, position: Array, flat: Array, members: Bool[Array, "o p"]
) -> Choice:
    """Return each owner's lowest-ranked token, the oldest among equal ranks."""
    low = jnp.where(allowed, ranks, jnp.inf)
    best = low.min(1)
    tied = allowed & (low == best[:, None])
    age = jnp.where(tied, position, NO_SLOT)
    oldest = age.min(1)
    slot = jnp.where(tied & (age == oldest[:, None]), flat, NO_SLOT).min(1)
    by_owner = jnp.where(members, best, jnp.inf)
    rank = by_owner.min(1)
    tied = members & (by_owner == rank[:, None])
    ages = jnp.where(tied, oldest, NO_SLOT)
    first = ages.min(1)
    return rank, first, jnp.where(tied & (ages == first[:, None]), slot, NO_SLOT).min(1)


def _better(a: Choice, b: Choice) -> Choice:
    """Return the lower-ranked of two tokens per owner, the older one if their ranks are equal."""
    second = (b[0] < a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
    return tuple(jnp.where(second, y, x) for x, y in zip(a, b, strict=True))  # type: ignore[return-value]
