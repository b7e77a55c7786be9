"""Heads with caches of their own sizes: one pool of pages for all layers, rows and heads.

A page holds some slots of one head; the pages of a head, and those of a layer, lie side by side. Every page is one
flash-decoding split, and what belongs to one head is merged by the page's owner, so nothing is gathered or padded. A
layer's pages are visited in blocks, from its first to its last, both known only at run time: one program serves
every prompt whose pool has the same number of pages.
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
"""Pages whose positions and scores are looked at together, at most: they are small."""


class Pages(struct.PyTreeNode):
    """The caches of a whole model: P pages of s slots each."""

    kv: KV
    """k, v [P s d]"""
    position: Int[Array, "P s"]
    """Original position of the token in each slot; -1 = empty."""
    slots: Parts
    """What the parts remember of each slot: leaves [P s ...]."""
    owner: Int[Array, " P"]
    """Which (row, KV head) a page belongs to: row * heads + head."""
    first: Int[Array, " P"]
    """Which of its head's slots a page begins with."""
    start: Int[Array, " layers_and_1"]
    """The first page of each layer, and the end of the last."""
    state: tuple[Parts, ...]
    """For each layer what the parts remember of it: leaves [b h ...]."""
    limit: tuple[Int[Array, "b h"], ...]
    """For each layer the slots that each head may use."""
    logits: Float[Array, "P_or_more g s"] | None = None
    """Where a step keeps those of one layer after another; None between steps."""
    most: int = setting(0)
    """Slots that no head exceeds, of few different sizes, as programs depend on it."""
    devices: tuple[int, int] = setting((1, 1))
    """Among how many devices rows and KV heads lie: pools of their own, one behind the other, as are their tables."""

    @property
    def page_size(self) -> int:
        """Slots in a page."""
        return self.position.shape[1]

    def heads(self, layer: int) -> Heads:
        """What is known of a layer's heads as wholes."""
        return Heads(self.limit[layer], self.state[layer])

    def put_state(self, layer: int, **state: PyTree) -> Self:
        """With what some parts remember of a layer, by the parts' names."""
        changed = self.state[layer].replace(**state)
        return self.replace(state=(*self.state[:layer], changed, *self.state[layer + 1 :]))

    @property
    def slots_dtype(self) -> Any:
        """Of the numbers that attention is computed from."""
        return next(leaf.dtype for leaf in jax.tree.leaves(self.kv) if jnp.issubdtype(leaf.dtype, jnp.floating))

    def over_pages(
        self, layer: int, look: Callable[[Any, Array, Array], Any], carry: Any, block: int = VIEW_BLOCK
    ) -> Any:
        """Fold `look(carry, at, valid)` over a layer's pages: blocks start at page `at`, `valid` masks new pages."""
        pages = self.owner.shape[0]
        size = min(block, pages)
        start, end = self.start[layer], self.start[layer + 1]

        def look_at(i: Array, carry: Any) -> Any:
            wanted = start + i * size
            at = jnp.minimum(wanted, pages - size)  # the last block of the pool looks back
            page = at + jnp.arange(size)
            return look(carry, at, (page >= wanted) & (page < end))

        return jax.lax.fori_loop(0, (end - start + size - 1) // size, look_at, carry)

    def view(self, layer: int, new: New, at: Array | int, count: int) -> tuple[View, New, Int[Array, " p"]]:
        """A block of pages as a part sees it: a layer with a page in each row and one head."""
        heads = new.k.shape[1]
        owner = jax.lax.dynamic_slice_in_dim(self.owner, at, count)
        row = owner // heads

        def of_head(leaf: Array) -> Array:
            return leaf.reshape(-1, *leaf.shape[2:])[owner][:, None]

        def of_page(leaf: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(leaf, at, count)[:, None]

        view = View(
            limit=of_head(self.limit[layer]),
            state=jax.tree.map(of_head, self.state[layer]),
            kv=jax.tree.map(of_page, self.kv),
            position=of_page(self.position),
            slots=jax.tree.map(of_page, self.slots),
        )
        of_heads = {name: of_head(getattr(new, name)) for name in ("q", "k", "v", "raw_q", "raw_k")}
        names = ("hidden", "position", "token", "prompt_length", "read", "horizon", "end", "seed")
        of_rows = {name: getattr(new, name)[row] for name in names}
        first = new.spread.first(heads)
        return view, new.replace(**of_heads, **of_rows, head=(first + owner % heads)[:, None]), owner

    def limits(self) -> tuple[Int[Array, "b h"], ...]:
        """For each layer the slots that each head may use."""
        return self.limit

    def states(self) -> tuple[Parts, ...]:
        """For each layer what the parts remember of its heads."""
        return self.state

    def stored_positions(self) -> Int[Array, "P s"]:
        """Positions as they are stored, to be collected inside of a loop."""
        return self.position

    def positions(self, stored: Any = None) -> list[np.ndarray]:
        """For each layer the position in each slot [b h c], -1 where there is none, on the host.

        Args:
            stored: another moment's `stored_positions`; None for now.
        """
        pools = int(np.prod(self.devices))
        held = self.position if stored is None else stored
        tables = zip(*(np.split(on_host(x), pools) for x in (held, self.owner, self.first, self.start)), strict=True)
        counts = [-(-int(on_host(limit).max()) // self.page_size) * self.page_size for limit in self.limit]
        layers = [np.full((*limit.shape, count), -1, np.int32) for limit, count in zip(self.limit, counts, strict=True)]
        for pool, (positions, owner, first, start) in enumerate(tables):
            for layer, dense in enumerate(layers):
                rows, heads, count = dense.shape
                rows, heads = rows // self.devices[0], heads // self.devices[1]
                row, head = np.array(divmod(pool, self.devices[1])) * (rows, heads)
                for page in range(start[layer], start[layer + 1]):
                    room = max(0, min(self.page_size, count - first[page]))
                    of_row, of_head = divmod(owner[page], heads)
                    slots = slice(first[page], first[page] + room)
                    dense[row + of_row, head + of_head, slots] = positions[page][:room]
        return layers

    def unpack(self) -> Dense:
        """All layers in buffers of `most` slots for each head."""
        return Dense(tuple(self._layer(index) for index in range(len(self.limit))))

    def _layer(self, index: int) -> View:
        flat, real = self._flat(index)
        rows, heads = self.limit[index].shape

        def fetch(leaf: Array) -> Array:
            found = leaf.reshape(-1, *leaf.shape[2:])[jnp.minimum(flat, self.position.size - 1)]
            return found.reshape(rows, heads, self.most, *leaf.shape[2:])

        position = jnp.where(real.reshape(rows, heads, self.most), fetch(self.position), -1)
        kv, remembered = jax.tree.map(fetch, (self.kv, self.slots))
        return View(self.limit[index], self.state[index], kv, position, remembered)

    def _flat(self, index: int) -> tuple[Int[Array, " n"], Bool[Array, " n"]]:
        # Where each head's slots lie in the pool, `most` of them, and which of these there are.
        owners = self.limit[index].size
        page = jnp.arange(len(self.owner))
        mine = (page >= self.start[index]) & (page < self.start[index + 1])
        first = jnp.where((self.owner == jnp.arange(owners)[:, None]) & mine, page, len(page)).min(1)
        slot = jnp.arange(self.most)
        flat = (first[:, None] * self.page_size + slot).reshape(-1)
        return flat, (slot < self.limit[index].reshape(-1)[:, None]).reshape(-1)
