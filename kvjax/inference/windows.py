"""Windows of layers in rows whose text outgrows the length that was planned."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from kvjax.cache.buffers import with_empty_slots
from kvjax.cache.layer import LayerCache
from kvjax.cache.paged.select import Selected
from kvjax.cache.slots import Slots
from kvjax.inference.budget import lines_of
from kvjax.inference.cache import Bound, Cache
from kvjax.inference.padding import among_devices, round_slots
from kvjax.inference.press import on_pages
from kvjax.inference.sharding import gather_slots, on_mesh, placed_rows, scatter_slots
from kvjax.methods.neighbors import text_order
from kvjax.methods.registry import name_of
from kvjax.types import OF_HEADS, PyTree
from kvjax.utils.processes import on_host


def planned_ends(cache: Cache, read: Int[np.ndarray, " b"]) -> Int[np.ndarray, " b"]:
    """Return the planned length of each text, or its length if that is larger."""
    return np.maximum(on_host(cache.end).astype(np.int64), read)


def with_windows(cache: Cache, decoder: Bound, read: Int[np.ndarray, " b"]) -> Cache:
    """Give layers the slots of their windows in rows whose text, of `read` tokens, outgrows both window and plan."""
    policy, config, mesh = decoder.policy, decoder.config, decoder.mesh
    before, end = on_host(cache.end), planned_ends(cache, read)
    shapes = [config.layer(index) for index in config.storing]
    outgrown = [layer.bounded_by_window(end) & ~layer.bounded_by_window(before) for layer in shapes]
    rows = np.any(outgrown, 0)
    if not rows.any():
        return cache
    windows = [(layer.window or 0) + decoder.beyond_window for layer in shapes]
    limits = [
        np.where(grows[:, None], window, on_host(heads.limit)).astype(np.int32)
        for grows, window, heads in zip(outgrown, windows, cache.attending, strict=True)
    ]
    fixed = jax.tree.structure(policy.sized(lines_of(limits))) != jax.tree.structure(policy)
    requires = policy.score.requires
    if fixed or requires.shared_slots == "layers" or requires.host_memory:
        row = int(rows.argmax())
        raise ValueError(
            f"a text of {read[row]} tokens outgrows the {before[row]} that were planned in row {row} and a layer's "
            f"window, for which {name_of(policy)} cannot change its slots; give prefill more max_new_tokens."
        )
    cache = placed_rows(cache.replace(end=jnp.asarray(np.where(rows, end, before), jnp.int32)), mesh)
    sizes = [round_slots(window) if grows.any() else 0 for grows, window in zip(outgrown, windows, strict=True)]
    allowed = tuple(map(jnp.asarray, limits))
    grown = _grown(cache.replace(key=None), allowed, capacities=among_devices(sizes, mesh), mesh=mesh)
    page_size = 0 if cache.pool is None else cache.pool.page_size
    layers = cache.with_layers(dict(zip(config.storing, grown, strict=True)))
    return cache.replace(**on_pages(layers, policy, page_size, mesh))


@functools.partial(jax.jit, static_argnames=("capacities", "mesh"))
def _grown(
    cache: Cache, limits: tuple[Int[Array, "b _"], ...], *, capacities: tuple[int, ...], mesh: Mesh | None
) -> tuple[LayerCache, ...]:
    paged = cache.pool is not None

    def grow(cache: Cache, limits: tuple[Array, ...]) -> tuple[LayerCache, ...]:
        layers = zip(gather_slots(cache, mesh).slots, limits, capacities, strict=True)
        views = [with_empty_slots(view.replace(limit=limit), capacity) for view, limit, capacity in layers]
        if not paged:
            return scatter_slots(tuple(views), mesh)
        return tuple(Selected(view, text_order(view.position), view.live.sum(-1, dtype=jnp.int32)) for view in views)

    def specs() -> tuple[PyTree, PyTree]:
        layers = (Selected.specs if paged else Slots.specs,) * len(limits)
        return (cache.specs, (OF_HEADS,) * len(limits)), layers

    return on_mesh(grow, mesh, specs)(cache, limits)
