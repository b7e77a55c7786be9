"""Paged storage, whose heads have caches of individual sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import slots
from kvjax.cache.attention import with_evicted
from kvjax.cache.dense import Dense
from kvjax.cache.evict import evicted_pairs
from kvjax.cache.paged.pages import Pages, owned
from kvjax.cache.paged.stats import PageAnswers, check_asks, of_pages, page_answers
from kvjax.cache.paged.table import gathered
from kvjax.cache.slots import Attended
from kvjax.policies.policy import Policy
from kvjax.types import KV, Evicted, LayerConfig, New, PyTree, View, wide
from pallas_kernels.attention import LowRank, Partial
from pallas_kernels.evict.reference import after_reading
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.ranking import protected

NO_SLOT = jnp.iinfo(jnp.int32).max
"""Slot number that means no slot; larger than all others."""

Choice = tuple[Float[Array, " o"], Int[Array, " o"], Int[Array, " o"]]
"""Rank, position and slot of one token per owner."""

OfPages = Callable[[View, New, Array | int], Float[Array, "p s"]]
"""Gives a number for each slot of a block of pages: the block as a view, its tokens, and its first page."""


class Candidates(NamedTuple):
    """Eviction candidates of each head."""

    rest: Choice
    """Lowest-ranked slot outside the competition: empty, or with a token that is evicted last or never."""
    weakest: Choice
    """Lowest-ranked slot that competes."""
    surplus: Int[Array, " o"]
    """Number of tokens over the quota: the lowest-ranked one is evicted if it is above 0, and more if above 1."""


class Paged(Pages):
    """Caches of a whole model on pages."""

    def exchange(self, policy: Policy, layer: int, new: New, *, pairs: bool = False) -> tuple[Paged, Evicted]:
        """Write one new token per row into the lowest-ranked slot of each head; see `Dense.exchange`."""
        pool, candidates = self._shrunk(policy, layer, new)
        state = policy.codec.begin(pool.layers[layer], new).state
        pool = pool.put_state(layer, codec=state.codec)
        slot = _victim(candidates, new)
        added: dict[str, PyTree] = {"kv": policy.codec.encode(new, state.codec), "slots": policy.slots(new, state)}
        added["position"] = jnp.broadcast_to(new.position[:, None], new.k.shape[:3]).astype(jnp.int32)
        kv, left, place = taken = pool._taken(slot, pairs)
        pool = pool._write_slots(after_reading(slot, taken), added)
        if place is not None:
            pool = pool._requeued(policy, layer, new, place, left)
        return pool, evicted_pairs(state, new, kv, left)

    def _shrunk(self, policy: Policy, layer: int, new: New) -> tuple[Paged, Candidates]:
        """Evict tokens until each head must evict at most one more, and return the candidates for it."""

        standing = self._of_slots(policy, layer, new, lambda policy, view, new: policy.standing(view, new)[0])
        known = self._of_slots(policy, layer, new, slots.rank), standing
        start = self._contest(policy, layer, new, *known)
        if not policy.may_shrink:
            return self, start

        def leaving(candidates: Candidates) -> Int[Array, "b h"]:
            slot = jnp.where(candidates.surplus > 1, candidates.weakest[2], NO_SLOT).reshape(new.k.shape[:2])
            return jnp.where(new.valid[:, :1], slot, NO_SLOT)

        # The loop carries only positions, the order of slots and states: XLA would copy a carried pool.
        def small(pool: Paged) -> tuple[PyTree, ...]:
            state = pool.layers[layer].state
            return pool.position, pool.slots.codec, state.codec, state.residual

        def whole(position: Array, queue: PyTree, codec: PyTree, residual: PyTree) -> Paged:
            pool = self.replace(position=position, slots=self.slots.replace(codec=queue))
            return pool.put_state(layer, codec=codec, residual=residual)

        def lose(carry: tuple[tuple[PyTree, ...], Candidates]) -> tuple[tuple[PyTree, ...], Candidates]:
            pool, slot = whole(*carry[0]), leaving(carry[1])
            (kv, left, place), state = pool._taken(slot, policy.residual is not None), pool.layers[layer].state
            if policy.residual is not None:
                evicted = evicted_pairs(state, new, kv, left)
                pool = pool.put_state(layer, residual=policy.residual.absorb(state.residual, evicted))
            pool = pool._write_slots(slot, {"position": jnp.full_like(slot, -1)})
            if place is not None:
                pool = pool._requeued(policy, layer, new, place, left, arrives=False)
            return small(pool), pool._contest(policy, layer, new, *known)

        after, candidates = jax.lax.while_loop(
            lambda carry: (leaving(carry[1]) < NO_SLOT).any(), lose, (small(self), start)
        )
        return whole(*after), candidates

    def _taken(self, slot: Int[Array, "b h"], pairs: bool) -> tuple[KV | None, Int[Array, "b h"], Any]:
        # Returns the pair in each slot, if requested, its position, and its place in the order if the codec tracks it.
        kv = self._at(self.kv, slot) if pairs else None
        left = jnp.where(slot < self.position.size, self._at(self.position, slot), -1)
        return kv, left, self._at(self.slots.codec, slot)

    def _requeued(
        self, policy: Policy, layer: int, new: New, place: Array, left: Array, *, arrives: bool = True
    ) -> Paged:
        codec, known = policy.codec, self.layers[layer].state.codec

        def look(queue: Array, at: Array, valid: Array) -> Array:
            view, seen, owner = self.replace(slots=self.slots.replace(codec=queue)).view(layer, new, at, len(valid))
            after = codec.requeued(view, seen, place.reshape(-1, 1)[owner], left.reshape(-1, 1)[owner])
            return write_pages(queue, after[:, 0], at, valid)

        queue = self.over_pages(layer, look, self.slots.codec)
        pool = self.replace(slots=self.slots.replace(codec=queue))
        return pool.put_state(layer, codec=codec.counted(known, new, left, arrives=arrives))

    def _contest(self, policy: Policy, layer: int, new: New, rank: OfPages, standing: OfPages) -> Candidates:
        owners = new.k.shape[0] * new.k.shape[1]
        most = self.layers[layer].limit
        limit = slots.slots_at(policy, most, new).reshape(-1)
        quota = policy.protection.guard(self.without_tokens(layer), new).quota
        # Heads that grow between two evictions have more slots than they may use at their smallest.
        grows, allocated = policy.evict_every > 1, most.reshape(-1) + self.spare
        if grows and quota is not None:
            raise ValueError(f"{policy.protection.label} has a quota at each token; use evict_every=1.")
        bound = allocated if grows else limit
        size = self.page_size

        def usable(at: Array, valid: Array, owner: Array) -> Bool[Array, "p s"]:
            slot = jax.lax.dynamic_slice_in_dim(self.first, at, len(valid))[:, None] + jnp.arange(size, dtype=jnp.int32)
            return valid[:, None] & (slot < bound[owner][:, None])

        def look(carry: Any, at: Array, valid: Array) -> Any:
            view, seen, owner = self.view(layer, new, at, len(valid))
            ranks, position = rank(view, seen, at), view.position[:, 0]
            here = usable(at, valid, owner)
            flat = (at + jnp.arange(len(valid), dtype=jnp.int32))[:, None] * size + jnp.arange(size, dtype=jnp.int32)
            members = owned(owner, valid, owners)
            if quota is None and not grows:
                return _better(carry[0], _lowest(here, ranks, position, flat, members)), *carry[1:]
            eligible = ranks > -jnp.inf if grows else ranks < slots.last_resort(ranks.dtype)
            competes = here & (position >= 0) & eligible
            count = jnp.where(members, competes.sum(-1, dtype=jnp.int32), 0).sum(1, dtype=jnp.int32)
            weakest = _better(carry[1], _lowest(competes, ranks, position, flat, members))
            rest = _better(carry[0], _lowest(here & ~competes, ranks, position, flat, members))
            return rest, weakest, carry[2] + count

        kind = jax.eval_shape(lambda: rank(*self.view(layer, new, 0, 1)[:2], 0)).dtype
        none, no_slot = jnp.zeros(owners, jnp.int32), jnp.full(owners, NO_SLOT, jnp.int32)
        nobody = jnp.full(owners, jnp.inf, kind), no_slot, no_slot
        rest, weakest, count = self.over_pages(layer, look, (nobody, nobody, none))
        if grows:
            return Candidates(rest, weakest, count - (limit - 1))
        if quota is None:
            return Candidates(rest, weakest, none)
        if not quota.among_all:
            return Candidates(rest, weakest, count - quota.most.reshape(-1))

        def ahead(count: Array, at: Array, valid: Array) -> Array:
            view, seen, owner = self.view(layer, new, at, len(valid))
            score, position = standing(view, seen, at), view.position[:, 0]
            low, age = weakest[0][owner][:, None], weakest[1][owner][:, None]
            higher = (score > low) | ((score == low) & (position > age))
            higher &= usable(at, valid, owner) & (position >= 0)
            members = owned(owner, valid, owners)
            return count + jnp.where(members, higher.sum(-1, dtype=jnp.int32), 0).sum(1, dtype=jnp.int32)

        place = self.over_pages(layer, ahead, none) + 1
        return Candidates(rest, weakest, jnp.where(weakest[2] < NO_SLOT, place - quota.most.reshape(-1), 0))

    def _of_slots(
        self, policy: Policy, layer: int, new: New, compute: Callable[[Policy, View, New], Float[Array, "b h c"]]
    ) -> OfPages:
        """Return a function that gives a number for each slot of a block of pages.

        A score that compares the slots of a head with each other is computed once, for all heads side by side. Slots
        that are emptied afterwards have the lowest number.
        """
        if not policy.score.requires.whole_heads:
            return lambda view, seen, at: compute(policy, view, seen)[:, 0]
        slot, real = self._slot_numbers(layer)
        found = compute(policy, self._layer(layer), new)
        room = jnp.zeros(self.position.shape, found.dtype)
        every = _with_entries(room, jnp.where(real, slot, room.size), found)

        def of_pages(view: View, seen: New, at: Array | int) -> Array:
            known = jax.lax.dynamic_slice_in_dim(every, at, len(view.position))
            return jnp.where(view.position[:, 0] >= 0, known, jnp.finfo(known.dtype).min)

        return of_pages

    def _write_slots(self, slot: Int[Array, "b h"], added: dict[str, PyTree]) -> Paged:
        return self.replace(**_with_entries({name: getattr(self, name) for name in added}, slot, added))

    def attend(
        self,
        policy: Policy,
        layer: int,
        new: New,
        asks: PyTree,
        remembered: LowRank | Partial | None,
        *,
        block: bool = False,
    ) -> tuple[Paged, Attended]:
        """Attend from one new token per row to the pages of its heads; see `Dense.attend`."""
        assert policy.selection is None and not block
        check_asks(policy, asks)
        known = self.layers[layer]
        every = View(known.limit, known.state, self.kv, self.position, self.slots)
        given = policy.codec.operands(every, new, places=self.most)
        new, given = given.with_bias(new, policy.slot_bias(every))
        found = paged_attention(
            given.q[:, :, :, 0],
            *given.stored,
            self.position,
            self.owner,
            self.start[layer : layer + 2],
            new.position[:, 0],
            new.config.spec,
            places=given.token_places,
            logits=self.logits,
            layers=len(self.start) - 1,
            **new.kernels._asdict(),
        )
        answers = page_answers(self, layer, new, asks, found)
        return self.replace(logits=found.logits), Attended(with_evicted(found.partial, remembered), answers)

    def with_scores(self, layer: int, out: Array) -> tuple[Paged, Array]:
        """Return the arguments unchanged: scores of all layers are in one pool, which layers update in turn."""
        return self, out

    def fold(self, policy: Policy, layer: int, asks: PyTree, answers: PageAnswers, new: New) -> Paged:
        """Update scores with the requested statistics, one block of pages at a time."""

        def look(score: PyTree, at: Array, valid: Array) -> PyTree:
            view, seen, owner = self.replace(slots=self.slots.replace(score=score)).view(layer, new, at, len(valid))
            after = policy.score.fold(of_pages(asks, answers, view, seen, at, owner, new), view, seen)
            here = valid & seen.valid[:, 0]
            return jax.tree.map(lambda room, leaf: write_pages(room, leaf[:, 0], at, here), score, after)

        score = self.over_pages(layer, look, self.slots.score)
        return self.replace(slots=self.slots.replace(score=score))

    def open(self, policy: Policy, configs: Sequence[LayerConfig], ahead: Callable[[int], New]) -> Paged:
        """Allocate logits for a step over all layers; see `Dense.open`."""
        kind = wide(ahead(0).k.dtype)
        return self.replace(logits=jnp.zeros((len(self.owner), configs[0].groups, self.page_size), kind))

    def close(self) -> Paged:
        """Drop the logits at the end of a step."""
        return self.replace(logits=None)

    def pack(self, dense: Dense) -> Paged:
        """Return a pool with the slots and states of an `unpack`ed storage, up to the heads' limits."""
        held, layers = (self.kv, self.position, self.slots), zip(self.layers, dense.layers, strict=True)
        for index, view in enumerate(dense.layers):
            slot, real = self._slot_numbers(index)
            slot = jnp.where(real, slot, self.position.size)
            held = _with_entries(held, slot, (view.kv, view.position, view.slots))
        kv, position, remembered = held
        heads = tuple(mine.replace(state=view.state) for mine, view in layers)
        return self.replace(kv=kv, position=position, slots=remembered, layers=heads)

    def take(self, index: Int[np.ndarray, " m"]) -> Paged:
        """Select rows, in any order; the page table is read on the host."""
        return gathered([self], [(0, int(row)) for row in index])

    def put(self, index: Int[np.ndarray, " m"], rows: Paged) -> Paged:
        """Replace some rows; the pool grows or shrinks with their number of pages."""
        size = min(self.page_size, rows.page_size)
        chosen = {int(row): (1, place) for place, row in enumerate(index)}
        count = len(self.layers[0].limit)
        return gathered([self._split(size), rows._split(size)], [chosen.get(row, (0, row)) for row in range(count)])

    def _split(self, size: int) -> Paged:
        # Returns the same slots in smaller pages.
        parts = self.page_size // size
        if parts == 1:
            return self

        def cut(leaf: Array) -> Array:
            return leaf.reshape(len(leaf) * parts, size, *leaf.shape[2:])

        first = (self.first[:, None] + size * jnp.arange(parts, dtype=jnp.int32)).reshape(-1)
        kv, position, remembered = jax.tree.map(cut, (self.kv, self.position, self.slots))
        owner, start = jnp.repeat(self.owner, parts), self.start * parts
        return self.replace(kv=kv, position=position, slots=remembered, owner=owner, first=first, start=start)


def _with_entries(tree: PyTree, slot: Int[Array, "*n"], entries: PyTree) -> PyTree:
    """Write entries into slots, numbered over the whole pool; those of slots out of bounds are dropped."""

    def write(leaf: Array, value: Array) -> Array:
        value = value.reshape(*slot.shape, *leaf.shape[2:]).astype(leaf.dtype)
        every = leaf.reshape(-1, *leaf.shape[2:])
        return every.at[slot].set(value, unique_indices=True, mode="drop").reshape(leaf.shape)

    return jax.tree.map(write, tree, entries)


def write_pages(room: Array, value: Array, at: Array, valid: Bool[Array, " p"]) -> Array:
    """Write a block of pages over all pages, from page `at` on, where `valid`."""
    mask = valid.reshape(-1, *(1,) * (room.ndim - 1))
    return jax.lax.dynamic_update_slice_in_dim(
        room, jnp.where(mask, value, jax.lax.dynamic_slice_in_dim(room, at, len(valid))), at, 0
    )


def _victim(candidates: Candidates, new: New) -> Int[Array, "b h"]:
    """Return the slot that the next token takes in each head, numbered over the whole pool; `NO_SLOT` for padding.

    If a quota bounds the competing tokens, the lowest-ranked one is evicted when they exceed it. Otherwise the new
    token takes an empty slot, else that of the oldest token that is evicted last, else that of the lowest-ranked token.
    """
    rest, weakest, surplus = candidates
    competes = (surplus > 0) | ((rest[0] >= protected(rest[0].dtype)) & (weakest[2] < NO_SLOT))
    chosen = jnp.where(competes, weakest[2], rest[2]).reshape(new.k.shape[:2])
    return jnp.where(new.valid[:, :1], chosen, NO_SLOT)


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
