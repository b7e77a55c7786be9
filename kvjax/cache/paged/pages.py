"""Pages for heads with caches of individual sizes: one pool for all layers, rows and heads.

A page holds slots of one head. The pages of a head are contiguous, and so are those of a layer. Each page is one
flash-decoding split, and results of pages are merged by owner, without gathering or padding. Blocks of pages are
visited from a layer's first page to its last; both are known only at run time. One program therefore serves all prompts
whose pools have the same number of pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.slots import SlotCache, Slots
from kvjax.types import KV, OF_POOL, LayerTokens, Parts, PyTree, View, setting
from kvjax.utils.processes import on_host

VIEW_BLOCK = 256
"""Maximal number of pages whose positions and scores are processed together; they are small."""


class Pool(struct.PyTreeNode):
    """Pages of a whole model: P pages of s slots each."""

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
    logits: Float[Array, "P_or_more g s"] | None = None
    """Buffer for attention logits during a step, which layers reuse one after another; None between steps."""
    max_slots: int = setting(0)
    """Upper bound on slots per head, rounded to few different sizes because programs depend on it."""
    spare: int = setting(0)
    """Slots that each head has beyond its limit, for tokens between two evictions."""
    layers: int = setting(0)
    """Number of layers that share the pool."""
    devices: tuple[int, int] = setting((1, 1))
    """Numbers of devices that shard rows and KV heads; their pools are concatenated, and so are their tables."""

    @property
    def page_size(self) -> int:
        """Slots in a page."""
        return self.position.shape[1]

    @property
    def specs(self) -> Any:
        """`PartitionSpec` of each array on a mesh, without logits."""
        return self.replace(**dict.fromkeys(("kv", "position", "slots", "owner", "first"), OF_POOL))

    def with_logits(self, groups: int, dtype: DTypeLike) -> Self:
        """Allocate logits for a step over all layers, of `groups` query heads for each page."""
        return self.replace(logits=jnp.zeros((len(self.owner), groups, self.page_size), dtype))

    def at(self, tree: PyTree, slot: Int[Array, "*n"]) -> PyTree:
        """Return entries of slots, numbered over the whole pool; those of slots out of bounds are arbitrary."""

        def take(leaf: Array) -> Array:
            flat = leaf.reshape(-1, *leaf.shape[2:])
            return flat[jnp.minimum(slot, len(flat) - 1)]

        return jax.tree.map(take, tree)

    def write(self, slot: Int[Array, "*n"], entries: dict[str, PyTree]) -> Self:
        """Write entries of some fields into slots, numbered over the whole pool; slots out of bounds are dropped."""

        def put(leaf: Array, value: Array) -> Array:
            value = value.reshape(*slot.shape, *leaf.shape[2:]).astype(leaf.dtype)
            flat = leaf.reshape(-1, *leaf.shape[2:])
            return flat.at[slot].set(value, unique_indices=True, mode="drop").reshape(leaf.shape)

        fields = {name: getattr(self, name) for name in entries}
        return self.replace(**jax.tree.map(put, fields, entries))

    def split(self, size: int) -> Self:
        """Return the same slots in smaller pages."""
        parts = self.page_size // size
        if parts == 1:
            return self

        def cut(leaf: Array) -> Array:
            return leaf.reshape(len(leaf) * parts, size, *leaf.shape[2:])

        first = (self.first[:, None] + size * jnp.arange(parts, dtype=jnp.int32)).reshape(-1)
        kv, position, states = jax.tree.map(cut, (self.kv, self.position, self.slots))
        owner = jnp.repeat(self.owner, parts)
        return self.replace(kv=kv, position=position, slots=states, owner=owner, first=first)

    def positions(self, layers: Sequence[LayerPages], stored: Any = None) -> list[np.ndarray]:
        """Return positions [b h c] by layer on the host, -1 in empty slots; `stored` are those of an earlier step."""
        pools, size = int(np.prod(self.devices)), self.page_size
        pages = self.position if stored is None else stored
        tables = list(zip(*(np.split(on_host(x), pools) for x in (pages, self.owner, self.first)), strict=True))
        by_layer: list[np.ndarray] = []
        for layer in layers:
            limit = on_host(layer.limit)
            count = -(-(int(limit.max()) + self.spare) // size) * size
            dense: np.ndarray = np.full((*limit.shape, count), -1, np.int32)
            rows, heads = dense.shape[0] // self.devices[0], dense.shape[1] // self.devices[1]
            for device, (positions, owner, first) in enumerate(tables):
                row, head = np.array(divmod(device, self.devices[1])) * (rows, heads)
                start, end = on_host(layer.pages).reshape(pools, 2)[device].tolist()
                page = np.arange(start, end)
                page = page[first[page] < count]  # smaller pages from `split` may be beyond the limit
                at = row + owner[page] // heads, head + owner[page] % heads
                dense[at[0][:, None], at[1][:, None], first[page][:, None] + np.arange(size)] = positions[page]
            by_layer.append(dense)
        return by_layer


class LayerPages(SlotCache, kw_only=True):
    """Pages of one layer in a pool, which the cache borrows while its layer runs."""

    pages: Int[Array, " 2"]
    """First page of the layer, and the end of its pages."""
    pool: Pool | None = None

    @property
    def linked(self) -> Pool:
        """The borrowed pool."""
        assert self.pool is not None
        return self.pool

    def link(self, earlier: Sequence[Any], pool: Any) -> Self:
        return self.replace(pool=pool)

    def unlink(self, pool: Any) -> tuple[Self, Any]:
        return self.replace(pool=None), self.pool

    def without_tokens(self) -> View:
        """Return the layer's heads with one empty slot each, for results that depend on heads alone."""
        pool = self.linked

        def empty(leaf: Array) -> Array:
            return jnp.zeros((*self.limit.shape, 1, *leaf.shape[2:]), leaf.dtype)

        kv, slots = jax.tree.map(empty, (pool.kv, pool.slots))
        return View(self.limit, self.state, kv, empty(pool.position) - 1, slots)

    def over_pages(self, body: Callable[[Any, Array, Array], Any], carry: Any, block: int = VIEW_BLOCK) -> Any:
        """Fold `body(carry, at, valid)` over blocks of pages from page `at` on; `valid` marks unvisited pages."""
        pages = self.linked.owner.shape[0]
        size = min(block, pages)
        start, end = self.pages[0], self.pages[1]

        def step(i: Array, carry: Any) -> Any:
            begin = start + i * size
            at = jnp.minimum(begin, pages - size)  # the pool's last block overlaps the one before
            page = at + jnp.arange(size)
            return body(carry, at, (page >= begin) & (page < end))

        return jax.lax.fori_loop(0, (end - start + size - 1) // size, step, carry)

    def view(self, new: LayerTokens, at: Array | int, count: int) -> tuple[View, LayerTokens, Int[Array, " p"]]:
        """Return a block of pages as a layer with one page per row and one head, their tokens, and their owners."""
        heads, pool = new.k.shape[1], self.linked
        owner = jax.lax.dynamic_slice_in_dim(pool.owner, at, count)
        row = owner // heads

        def of_head(leaf: Array) -> Array:
            return leaf.reshape(-1, *leaf.shape[2:])[owner][:, None]

        def of_page(leaf: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(leaf, at, count)[:, None]

        view = View(
            limit=of_head(self.limit),
            state=jax.tree.map(of_head, self.state),
            kv=jax.tree.map(of_page, pool.kv),
            position=of_page(pool.position),
            slots=jax.tree.map(of_page, pool.slots),
        )
        of_heads = {name: of_head(getattr(new, name)) for name in ("q", "k", "v", "raw_q", "raw_k")}
        names = ("hidden", "position", "token", "prompt_length", "read", "horizon", "end", "seed", "rope_length")
        of_rows = {name: jax.tree.map(lambda leaf: leaf[row], getattr(new, name)) for name in names}
        first = new.spread.first(heads)
        head = (first + owner % heads)[:, None]
        return view, new.replace(**of_heads, **of_rows, head=head, sink_logits=None), owner

    def unpacked(self) -> Slots:
        """Return the layer in buffers of `max_slots` slots per head."""
        pool, (slot, exists) = self.linked, self.slot_numbers()
        kv, position, states = pool.at((pool.kv, pool.position, pool.slots), slot)
        return Slots(self.limit, self.state, kv, jnp.where(exists, position, -1), states)

    def packed(self, contents: Slots) -> Self:
        """Return the layer with the contents of `unpacked` slots, up to the heads' limits."""
        pool, (slot, exists) = self.linked, self.slot_numbers()
        slot = jnp.where(exists, slot, pool.position.size)
        entries = {"kv": contents.kv, "position": contents.position, "slots": contents.slots}
        return self.replace(state=contents.state, pool=pool.write(slot, entries))

    def slot_numbers(self) -> tuple[Int[Array, "b h most"], Bool[Array, "b h most"]]:
        """Return the numbers of `max_slots` slots per head over the whole pool, and a mask of the slots that exist."""
        pool, limit = self.linked, self.limit
        page, slot = jnp.arange(len(pool.owner)), jnp.arange(pool.max_slots)
        of_layer = (page >= self.pages[0]) & (page < self.pages[1])
        first = jnp.where((pool.owner == jnp.arange(limit.size)[:, None]) & of_layer, page, len(page)).min(1)
        number = first.reshape(limit.shape)[..., None] * pool.page_size + slot
        return number, slot < limit[..., None] + pool.spare


def owned(owner: Int[Array, " p"], valid: Bool[Array, " p"], owners: int) -> Bool[Array, "o p"]:
    """Return a mask of the pages of each owner."""
    return (owner == jnp.arange(owners)[:, None]) & valid


def write_pages(buffer: Array, value: Array, at: Array, valid: Bool[Array, " p"]) -> Array:
    """Write a block of pages over all pages, from page `at` on, where `valid`."""
    mask = valid.reshape(-1, *(1,) * (buffer.ndim - 1))
    return jax.lax.dynamic_update_slice_in_dim(
        buffer, jnp.where(mask, value, jax.lax.dynamic_slice_in_dim(buffer, at, len(valid))), at, 0
    )
