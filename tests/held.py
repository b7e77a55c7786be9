"""Which tokens a state holds, whichever way its caches are stored."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvjax import paged
from kvjax.decode import State
from kvjax.types import LayerCache

Caches = tuple[LayerCache, ...] | paged.Pool


def layers(state: State) -> tuple[LayerCache, ...]:
    """The caches of a state whose heads have buffers of one size."""
    assert not isinstance(state.caches, paged.Pool)
    return state.caches


def stored(caches: Caches) -> Any:
    """Positions as the caches store them, to be collected inside a loop."""
    return caches.position if isinstance(caches, paged.Pool) else tuple(cache.position for cache in caches)


def unpacked(caches: Caches, steps: Any) -> list[np.ndarray]:
    """For each layer [n, b, h, c], from what `stored` gave n times; -1 where there is no token."""
    if not isinstance(caches, paged.Pool):
        return [np.asarray(layer) for layer in steps]
    by_step = [paged.positions(caches, step) for step in np.asarray(steps)]
    return [np.stack([layers[index] for layers in by_step]) for index in range(len(caches.limit))]
