"""Page tables, which assign pages to heads, built on the host; and rows gathered from pools of pages into one pool."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Int

from kvjax.cache.paged.pages import Pages
from kvjax.types import HEADS, ROWS, PyTree
from kvjax.utils.processes import on_host

P = TypeVar("P", bound=Pages)


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
    most: int


def table(limits: Int[np.ndarray, "layers b h"], page_size: int, devices: tuple[int, int] = (1, 1)) -> Table:
    """Assign pages to all heads; `devices` are the numbers of devices that shard rows and heads."""
    parts = [of_head for of_row in np.split(limits, devices[0], 1) for of_head in np.split(of_row, devices[1], 2)]
    pages = [-(-part.reshape(len(part), -1) // page_size) for part in parts]
    total = round_pages(max(int(part.sum()) for part in pages))
    owners, firsts, starts = [], [], []
    for part in pages:
        start, flat = np.concatenate([[0], np.cumsum(part.sum(1))]), part.reshape(-1)
        before, rest = np.repeat(np.cumsum(flat) - flat, flat), (0, total - start[-1])
        owners.append(np.pad(np.repeat(np.arange(flat.size) % part.shape[1], flat), rest))
        firsts.append(np.pad((np.arange(start[-1]) - before) * page_size, rest))
        starts.append(start)
    owner, first, start = (np.concatenate(x).astype(np.int32) for x in (owners, firsts, starts))
    return Table(owner, first, start, max(16, 1 << (int(limits.max()) - 1).bit_length()))


def gathered(pools: Sequence[P], rows: Sequence[tuple[int, int]]) -> P:
    """Gather rows, as pairs (index of a pool, row in it), from pools with equal page sizes into one pool."""
    devices = pools[0].devices
    if any(pool.devices != devices for pool in pools):
        raise ValueError("rows of a state on one mesh do not fit a state on another one; read both on the same.")
    if len(rows) % devices[0]:
        raise ValueError(
            f"{len(rows)} rows with separate slots for each head cannot be sharded over data={devices[0]} devices; "
            f"take a multiple of {devices[0]} rows, or read these prompts on fewer devices along data."
        )
    row_counts = [len(pool.layers[0].limit) for pool in pools]
    layers, heads, here = len(pools[0].layers), pools[0].layers[0].limit.shape[1] // devices[1], len(rows) // devices[0]
    tables = [tuple(on_host(x).reshape(*devices, -1) for x in (pool.owner, pool.first, pool.start)) for pool in pools]
    owned = [count // devices[0] for count in row_counts]
    # A device gathers from all pages of its heads; the pages of the pools are concatenated.
    counts = [first.shape[-1] for _, first, _ in tables]
    before = np.concatenate([[0], np.cumsum(counts) * devices[0]])
    pages, starts = [], []
    for of_rows, of_heads in np.ndindex(devices):
        sources, owners, firsts, start = [], [], [], [0]
        for layer in range(layers):
            for row, (which, old) in enumerate(rows[of_rows * here : (of_rows + 1) * here]):
                device, place = divmod(old, owned[which])
                owner, first, begin = (table[device, of_heads] for table in tables[which])
                for head in range(heads):
                    mine = np.flatnonzero(owner[begin[layer] : begin[layer + 1]] == place * heads + head)
                    mine += begin[layer]
                    sources.append(before[which] + device * counts[which] + mine)
                    owners += [row * heads + head] * len(mine)
                    firsts.append(first[mine])
            start.append(len(owners))
        pages.append(np.stack([np.concatenate(sources), owners, np.concatenate(firsts)]))
        starts.append(start)
    total = round_pages(max(page.shape[1] for page in pages))
    real = np.arange(total) < np.array([[page.shape[1]] for page in pages])
    padded = np.stack([np.pad(page, ((0, 0), (0, total - page.shape[1]))) for page in pages], axis=1)
    numbers = (jnp.asarray(x.reshape(-1), jnp.int32) for x in (*padded, np.array(starts)))
    held = [(pool.kv, pool.position, pool.slots) for pool in pools]
    mesh = None if devices == (1, 1) else pools[0].position.sharding.mesh  # type: ignore[attr-defined]
    (kv, position, remembered), owner, first, start = _moved(held, jnp.asarray(real.reshape(-1)), *numbers, mesh=mesh)
    offset = np.concatenate([[0], np.cumsum(row_counts)])
    chosen = np.array([offset[which] + row for which, row in rows])

    def rows_of(*leaves: Array) -> Array:
        return (leaves[0] if len(pools) == 1 else jnp.concatenate(leaves))[chosen]

    of_layers = jax.tree.map(rows_of, *(pool.layers for pool in pools))
    most = max(pool.most for pool in pools)
    of_pages = dict(kv=kv, position=position, slots=remembered, owner=owner, first=first, start=start)
    return pools[0].replace(**of_pages, layers=of_layers, most=most)


@functools.partial(jax.jit, static_argnames="mesh")
def _moved(
    held: list[PyTree], real: Bool[Array, " P"], index: Int[Array, " P"], *table: Int[Array, " n"], mesh: Mesh | None
) -> tuple[PyTree, ...]:
    """Gather the indexed pages of pools, and return them with their table; on a mesh, for each device."""

    def here(held: list[PyTree], real: Array, index: Array, *table: Array) -> tuple[PyTree, ...]:
        def pages_of(*leaves: Array) -> Array:
            if mesh is not None:
                leaves = tuple(jax.lax.all_gather(leaf, ROWS, tiled=True) for leaf in leaves)
            return (leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves))[index]

        kv, position, remembered = jax.tree.map(pages_of, *held)
        return (kv, jnp.where(real[:, None], position, -1), remembered), *table

    if mesh is None:
        return here(held, real, index, *table)
    spec = PartitionSpec((ROWS, HEADS))
    return jax.shard_map(here, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(held, real, index, *table)
