"""Page tables, which assign pages to heads, built on the host; and rows gathered from pools of pages into one pool."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from kvjax.cache.paged.pages import LayerPages, Pool
from kvjax.types import OF_POOL, ROWS, PyTree
from kvjax.utils.processes import on_host

Paged = tuple[tuple[LayerPages, ...], Pool]
"""Pages of all layers, and their pool."""


def page_slots(tokens: int) -> int:
    """Return the slots in a page for texts of up to `tokens` tokens: few, so that a head's last page wastes little."""
    return 16 if tokens <= 256 else 32 if tokens <= 512 else 64


def round_pages(pages: int) -> int:
    """Round up the number of pages in a pool, by at most 6.25%.

    The result is the next multiple of a sixteenth of the next lower power of two.
    """
    unit = max(1, 1 << (max(1, pages).bit_length() - 5)) if pages >= 16 else 1
    return -(-pages // unit) * unit


class Table(NamedTuple):
    """Page table of a pool; if several devices have pools, their tables are concatenated."""

    owner: Int[np.ndarray, " P"]
    first: Int[np.ndarray, " P"]
    start: Int[np.ndarray, " layers_and_1"]
    max_slots: int


def table(limits: Int[np.ndarray, "layers b h"], page_size: int, devices: tuple[int, int] = (1, 1)) -> Table:
    """Assign pages to all heads; `devices` are the numbers of devices that shard rows and heads."""
    parts = [of_head for of_row in np.split(limits, devices[0], 1) for of_head in np.split(of_row, devices[1], 2)]
    pages = [-(-part.reshape(len(part), -1) // page_size) for part in parts]
    total = round_pages(max(int(part.sum()) for part in pages))
    owners, firsts, starts = [], [], []
    for part in pages:
        start, flat = np.concatenate([[0], np.cumsum(part.sum(1))]), part.reshape(-1)
        before, padding = np.repeat(np.cumsum(flat) - flat, flat), (0, total - start[-1])
        owners.append(np.pad(np.repeat(np.arange(flat.size) % part.shape[1], flat), padding))
        firsts.append(np.pad((np.arange(start[-1]) - before) * page_size, padding))
        starts.append(start)
    owner, first, start = (np.concatenate(x).astype(np.int32) for x in (owners, firsts, starts))
    return Table(owner, first, start, max(16, 1 << (int(limits.max()) - 1).bit_length()))


def gathered(sources: Sequence[Paged], rows: Sequence[tuple[int, int]]) -> Paged:
    """Gather rows, as pairs (index of a source, row in it), from pools with equal page sizes into one pool."""
    pools, devices = [pool for _, pool in sources], sources[0][1].devices
    if any(pool.devices != devices for pool in pools):
        raise ValueError("rows of a state on one mesh do not fit a state on another one; read both on the same.")
    if len(rows) % devices[0]:
        raise ValueError(
            f"{len(rows)} rows with separate slots for each head cannot be sharded over data={devices[0]} devices; "
            f"take a multiple of {devices[0]} rows, or read these prompts on fewer devices along data."
        )
    limits = [layers[0].limit for layers, _ in sources]
    row_counts, layers = [len(limit) for limit in limits], len(sources[0][0])
    heads, rows_here = limits[0].shape[1] // devices[1], len(rows) // devices[0]

    def by_device(array: Array) -> np.ndarray:
        return on_host(array).reshape(*devices, -1)

    tables = [(by_device(pool.owner), by_device(pool.first)) for pool in pools]
    pages_of = [[by_device(layer.pages) for layer in layers] for layers, _ in sources]
    rows_of_device = [count // devices[0] for count in row_counts]
    # A device gathers from all pages of its heads; the pages of the pools are concatenated.
    counts = [first.shape[-1] for _, first in tables]
    before = np.concatenate([[0], np.cumsum(counts) * devices[0]])
    pages, starts = [], []
    for of_rows, of_heads in np.ndindex(devices):
        origins, owners, firsts, start = [], [], [], [0]
        for layer in range(layers):
            for row, (which, old) in enumerate(rows[of_rows * rows_here : (of_rows + 1) * rows_here]):
                device, place = divmod(old, rows_of_device[which])
                owner, first = (table[device, of_heads] for table in tables[which])
                begin, end = pages_of[which][layer][device, of_heads]
                for head in range(heads):
                    of_head = np.flatnonzero(owner[begin:end] == place * heads + head) + begin
                    origins.append(before[which] + device * counts[which] + of_head)
                    owners += [row * heads + head] * len(of_head)
                    firsts.append(first[of_head])
            start.append(len(owners))
        pages.append(np.stack([np.concatenate(origins), owners, np.concatenate(firsts)]))
        starts.append(start)
    total = round_pages(max(page.shape[1] for page in pages))
    exists = np.arange(total) < np.array([[page.shape[1]] for page in pages])
    padded = np.stack([np.pad(page, ((0, 0), (0, total - page.shape[1]))) for page in pages], axis=1)
    of_layers = [np.array(starts)[:, layer : layer + 2] for layer in range(layers)]
    numbers = [jnp.asarray(x.reshape(-1), jnp.int32) for x in (*padded, *of_layers)]
    contents = [(pool.kv, pool.position, pool.slots) for pool in pools]
    mesh = None if devices == (1, 1) else pools[0].position.sharding.mesh  # type: ignore[attr-defined]
    pages_and_table = _gather_pages(contents, jnp.asarray(exists.reshape(-1)), *numbers, mesh=mesh)
    (kv, position, states), owner, first, *ranges = pages_and_table
    offset = np.concatenate([[0], np.cumsum(row_counts)])
    index = np.array([offset[which] + row for which, row in rows])

    def rows_of(*leaves: Array) -> Array:
        return (leaves[0] if len(pools) == 1 else jnp.concatenate(leaves))[index]

    of_heads = [[(layer.limit, layer.state) for layer in layers] for layers, _ in sources]
    heads_of_layers = jax.tree.map(rows_of, *of_heads)
    pool = pools[0].replace(
        kv=kv, position=position, slots=states, owner=owner, first=first, max_slots=max(p.max_slots for p in pools)
    )
    after = zip(sources[0][0], heads_of_layers, ranges, strict=True)
    return tuple(layer.replace(limit=limit, state=state, pages=pages) for layer, (limit, state), pages in after), pool


@functools.partial(jax.jit, static_argnames="mesh")
def _gather_pages(
    contents: list[PyTree],
    exists: Bool[Array, " P"],
    index: Int[Array, " P"],
    *table: Int[Array, " n"],
    mesh: Mesh | None,
) -> tuple[Any, ...]:
    """Gather the indexed pages of pools, and return them with their table; on a mesh, for each device."""

    def move(contents: list[PyTree], exists: Array, index: Array, *table: Array) -> tuple[PyTree, ...]:
        def pages_of(*leaves: Array) -> Array:
            if mesh is not None:
                leaves = tuple(jax.lax.all_gather(leaf, ROWS, tiled=True) for leaf in leaves)
            return (leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves))[index]

        kv, position, states = jax.tree.map(pages_of, *contents)
        return (kv, jnp.where(exists[:, None], position, -1), states), *table

    if mesh is None:
        return move(contents, exists, index, *table)
    return jax.shard_map(move, mesh=mesh, in_specs=OF_POOL, out_specs=OF_POOL, check_vma=False)(
        contents, exists, index, *table
    )
