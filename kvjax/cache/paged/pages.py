"""Pages for heads with caches of individual sizes: one pool for all layers, rows and heads.

A page holds slots of one head. The pages of a head are contiguous, and so are those of a layer. Each page is one
flash-decoding split, and results of pages are merged by owner, without gathering or padding. Blocks of pages are
visited from a layer's first page to its last; both are known only at run time. One program therefore serves all prompts
whose pools have the same number of pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.dense import Dense
from kvjax.types import KV, Heads, New, Parts, PyTree, View, setting
from kvjax.utils.processes import on_host

VIEW_BLOCK = 256
"""Maximal number of pages whose positions and scores are processed together; they are small."""


class Pages(struct.PyTreeNode):
    """Caches of a whole model: P pages of s slots each."""

    kv: KV
    """Keys and values [P s d]."""
    position: Int[Array, "P s"]
    """Original position of the token in each slot; -1 for empty slots."""
    slots: Parts
    """States of the policy's parts for each slot: leaves [P s ...]."""
    owner: Int[Array, " P"]
    """Row and KV head that own each page: row * heads + head."""
    first: Int[Array, " P"]
    """First slot of each page, counted within its head."""
    start: Int[Array, " layers_and_1"]
    """First page of each layer, and the end of the last layer."""
    layers: tuple[Heads, ...]
    """Limits and states of each layer's heads."""
    logits: Float[Array, "P_or_more g s"] | None = None
    """Buffer for attention logits during a step, which layers reuse one after another; None between steps."""
    most: int = setting(0)
    """Upper bound on slots per head, rounded to few different sizes because programs depend on it."""
    spare: int = setting(0)
    """Slots that each head has beyond its limit, for tokens between two evictions."""
    devices: tuple[int, int] = setting((1, 1))
    """Numbers of devices that shard rows and KV heads; their pools are concatenated, and so are their tables."""

    @property
    def page_size(self) -> int:
        """Slots in a page."""
        return self.position.shape[1]

    def without_tokens(self, layer: int) -> View:
        """Return a layer's heads with one empty slot each, for results that depend on heads alone."""
        heads = self.layers[layer]

        def empty(leaf: Array) -> Array:
            return jnp.zeros((*heads.limit.shape, 1, *leaf.shape[2:]), leaf.dtype)

        kv, slots = jax.tree.map(empty, (self.kv, self.slots))
        return View(heads.limit, heads.state, kv, empty(self.position) - 1, slots)

    def put_state(self, layer: int, **state: PyTree) -> Self:
        """Replace states of some parts for a layer, given by the parts' names."""
        changed = self.layers[layer].replace(state=self.layers[layer].state.replace(**state))
        return self.replace(layers=(*self.layers[:layer], changed, *self.layers[layer + 1 :]))

    def over_pages(
        self, layer: int, look: Callable[[Any, Array, Array], Any], carry: Any, block: int = VIEW_BLOCK
    ) -> Any:
        """Fold `look(carry, at, valid)` over blocks of a layer's pages from `at` on; `valid` marks unvisited pages."""
        pages = self.owner.shape[0]
        size = min(block, pages)
        start, end = self.start[layer], self.start[layer + 1]

        def look_at(i: Array, carry: Any) -> Any:
            wanted = start + i * size
            at = jnp.minimum(wanted, pages - size)  # the pool's last block overlaps the one before
            page = at + jnp.arange(size)
            return look(carry, at, (page >= wanted) & (page < end))

        return jax.lax.fori_loop(0, (end - start + size - 1) // size, look_at, carry)

    def view(self, layer: int, new: New, at: Array | int, count: int) -> tuple[View, New, Int[Array, " p"]]:
        """Return a block of pages as a layer with one page per row and one head, their tokens, and their owners."""
        heads, held = new.k.shape[1], self.layers[layer]
        owner = jax.lax.dynamic_slice_in_dim(self.owner, at, count)
        row = owner // heads

        def of_head(leaf: Array) -> Array:
            return leaf.reshape(-1, *leaf.shape[2:])[owner][:, None]

        def of_page(leaf: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(leaf, at, count)[:, None]

        view = View(
            limit=of_head(held.limit),
            state=jax.tree.map(of_head, held.state),
            kv=jax.tree.map(of_page, self.kv),
            position=of_page(self.position),
            slots=jax.tree.map(of_page, self.slots),
        )
        of_heads = {name: of_head(getattr(new, name)) for name in ("q", "k", "v", "raw_q", "raw_k")}
        names = ("hidden", "position", "token", "prompt_length", "read", "horizon", "end", "seed", "rope_length")
        of_rows = {name: jax.tree.map(lambda leaf: leaf[row], getattr(new, name)) for name in names}
        first = new.spread.first(heads)
        head = (first + owner % heads)[:, None]
        return view, new.replace(**of_heads, **of_rows, head=head, sink_logits=None), owner

    def stored_positions(self) -> Int[Array, "P s"]:
        """Return positions as stored, for collection inside a loop."""
        return self.position

    def positions(self, stored: Any = None) -> list[np.ndarray]:
        """Return positions [b h c] by layer on the host, -1 in empty slots; `stored` are those of an earlier step."""
        pools, size = int(np.prod(self.devices)), self.page_size
        held = self.position if stored is None else stored
        tables = zip(*(np.split(on_host(x), pools) for x in (held, self.owner, self.first, self.start)), strict=True)
        limits = [on_host(heads.limit) for heads in self.layers]
        counts = [-(-(int(limit.max()) + self.spare) // size) * size for limit in limits]
        shapes = [(*limit.shape, count) for limit, count in zip(limits, counts, strict=True)]
        layers: list[np.ndarray] = [np.full(shape, -1, np.int32) for shape in shapes]
        for pool, (positions, owner, first, start) in enumerate(tables):
            for layer, dense in enumerate(layers):
                rows, heads = dense.shape[0] // self.devices[0], dense.shape[1] // self.devices[1]
                row, head = np.array(divmod(pool, self.devices[1])) * (rows, heads)
                page = np.arange(start[layer], start[layer + 1])
                page = page[first[page] < dense.shape[2]]  # smaller pages from `_split` may be beyond the limit
                at = row + owner[page] // heads, head + owner[page] % heads
                dense[at[0][:, None], at[1][:, None], first[page][:, None] + np.arange(size)] = positions[page]
        return layers

    def unpack(self) -> Dense:
        """Return all layers in dense buffers of `most` slots per head."""
        return Dense(tuple(self._layer(index) for index in range(len(self.layers))))

    def _layer(self, index: int) -> View:
        slot, real = self._slot_numbers(index)
        kv, position, remembered = self._at((self.kv, self.position, self.slots), slot)
        heads = self.layers[index]
        return View(heads.limit, heads.state, kv, jnp.where(real, position, -1), remembered)

    def _at(self, tree: PyTree, slot: Int[Array, "*n"]) -> PyTree:
        # Entries of slots, numbered over the whole pool; those of slots out of bounds are arbitrary.
        def take(leaf: Array) -> Array:
            every = leaf.reshape(-1, *leaf.shape[2:])
            return every[jnp.minimum(slot, len(every) - 1)]

        return jax.tree.map(take, tree)

    def _slot_numbers(self, index: int) -> tuple[Int[Array, "b h most"], Bool[Array, "b h most"]]:
        # Numbers of `most` slots per head over the whole pool, and a mask of the slots that exist.
        limit, page, slot = self.layers[index].limit, jnp.arange(len(self.owner)), jnp.arange(self.most)
        mine = (page >= self.start[index]) & (page < self.start[index + 1])
        first = jnp.where((self.owner == jnp.arange(limit.size)[:, None]) & mine, page, len(page)).min(1)
        number = first.reshape(limit.shape)[..., None] * self.page_size + slot
        return number, slot < limit[..., None] + self.spare


def owned(owner: Int[Array, " p"], valid: Bool[Array, " p"], owners: int) -> Bool[Array, "o p"]:
    """Return a mask of the pages of each owner."""
    return (owner == jnp.arange(owners)[:, None]) & valid
