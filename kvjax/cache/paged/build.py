"""Pool of pages from the selected tokens of a prompt."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.cache.paged.pages import Pool, write_pages
from kvjax.cache.paged.select import Selected
from kvjax.cache.paged.storage import Pages

PAGE_BLOCK = 64
"""Maximal number of pages whose keys and values are read together."""


def pack(
    selected: tuple[Selected, ...],
    owner: Int[Array, " P"],
    first: Int[Array, " P"],
    start: Int[Array, " layers_and_1"],
    *,
    page_size: int,
    max_slots: int,
    spare: int = 0,
    devices: tuple[int, int] = (1, 1),
) -> tuple[tuple[Pages, ...], Pool]:
    """Pack selected tokens into a pool of pages, whose table is from `table`, or one device's part of it."""

    def empty_buffer(leaf: Array) -> Array:
        return jnp.zeros((len(owner), page_size, *leaf.shape[3:]), leaf.dtype)

    example = selected[0].view
    pool = Pool(
        kv=jax.tree.map(empty_buffer, example.kv),
        position=empty_buffer(example.position) - 1,
        slots=jax.tree.map(empty_buffer, example.slots),
        owner=owner,
        first=first,
        max_slots=max_slots,
        spare=spare,
        layers=len(selected),
        devices=devices,
    )
    layers = list[Pages]()
    for index, layer in enumerate(selected):
        view = layer.view
        tokens = layer.order.shape[-1]
        order, count = layer.order.reshape(-1, tokens), layer.count.reshape(-1)

        def move(
            pool: Pool, at: Array, valid: Array, layer: Selected = layer, order: Array = order, count: Array = count
        ) -> Pool:
            tokens = order.shape[-1]
            owner = jax.lax.dynamic_slice_in_dim(pool.owner, at, len(valid))
            slot = jax.lax.dynamic_slice_in_dim(pool.first, at, len(valid))[:, None] + jnp.arange(page_size)
            exists = slot < count[owner][:, None]
            source = order[owner[:, None], jnp.minimum(slot, tokens - 1)] + (owner * tokens)[:, None]

            def fetch(leaf: Array) -> Array:
                return leaf.reshape(-1, *leaf.shape[3:])[source]

            view = layer.view
            kv, position, slots = jax.tree.map(fetch, (view.kv, view.position, view.slots))
            values = kv, jnp.where(exists, position, -1), slots
            buffers = pool.kv, pool.position, pool.slots
            kv, position, slots = jax.tree.map(lambda old, new: write_pages(old, new, at, valid), buffers, values)
            return pool.replace(kv=kv, position=position, slots=slots)

        pages = Pages(view.limit, view.state, pages=start[index : index + 2], pool=pool)
        layers.append(pages.replace(pool=None))
        pool = pages.over_pages(move, pool, PAGE_BLOCK)
    return tuple(layers), pool
