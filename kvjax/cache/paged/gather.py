"""Gathering rows from pools of pages into one pool; page tables are read on the host."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Int

from kvjax.cache.paged.pages import Pages
from kvjax.cache.paged.table import round_pages
from kvjax.types import HEADS, ROWS, PyTree
from kvjax.utils.processes import on_host

P = TypeVar("P", bound=Pages)


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
    layers, heads, here = len(pools[0].limit), pools[0].limit[0].shape[1] // devices[1], len(rows) // devices[0]
    tables = [tuple(on_host(x).reshape(*devices, -1) for x in (pool.owner, pool.first, pool.start)) for pool in pools]
    owned = [pool.limit[0].shape[0] // devices[0] for pool in pools]
    # A device gathers from all pages of its heads; the pages of the pools are concatenated.
    counts = [first.shape[-1] for _, first, _ in tables]
    before = np.concatenate([[0], np.cumsum(counts) * devices[0]])
    sources, owners, starts = [], [], []
    for of_rows, of_heads in np.ndindex(devices):
        source, owner, start = [], [], [0]
        for layer in range(layers):
            for row, (which, old) in enumerate(rows[of_rows * here : (of_rows + 1) * here]):
                device, place = divmod(old, owned[which])
                theirs, _, begin = (table[device, of_heads] for table in tables[which])
                for head in range(heads):
                    mine = np.flatnonzero(theirs[begin[layer] : begin[layer + 1]] == place * heads + head)
                    source.append(before[which] + device * counts[which] + begin[layer] + mine)
                    owner += [row * heads + head] * len(mine)
            start.append(len(owner))
        sources.append(np.concatenate(source))
        owners.append(np.array(owner))
        starts.append(np.array(start))
    total = round_pages(max(map(len, sources)))
    index = np.stack([np.pad(source, (0, total - len(source))) for source in sources])
    real = np.arange(total) < np.array([[len(source)] for source in sources])
    firsts = [
        np.concatenate([first[:, of_heads].reshape(-1) for _, first, _ in tables])
        for _, of_heads in np.ndindex(devices)
    ]
    first = np.where(real, np.take_along_axis(np.stack(firsts), index, 1), 0)
    owner = np.stack([np.pad(owner, (0, total - len(owner))) for owner in owners])
    numbers = (jnp.asarray(x.reshape(-1), jnp.int32) for x in (index, owner, first, np.stack(starts)))
    held = [(pool.kv, pool.position, pool.slots) for pool in pools]
    mesh = None if devices == (1, 1) else pools[0].position.sharding.mesh  # type: ignore[attr-defined]
    (kv, position, remembered), owner, first, start = _moved(held, jnp.asarray(real.reshape(-1)), *numbers, mesh=mesh)
    offset = np.concatenate([[0], np.cumsum([pool.limit[0].shape[0] for pool in pools])])
    chosen = np.array([offset[which] + row for which, row in rows])

    def rows_of(*leaves: Array) -> Array:
        return (leaves[0] if len(pools) == 1 else jnp.concatenate(leaves))[chosen]

    state, limit = jax.tree.map(rows_of, *((pool.state, pool.limit) for pool in pools))
    most = max(pool.most for pool in pools)
    of_pages = dict(kv=kv, position=position, slots=remembered, owner=owner, first=first, start=start)
    return pools[0].replace(**of_pages, state=state, limit=limit, most=most)


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
