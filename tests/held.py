"""Which tokens a state holds, whichever way its caches are stored."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvjax.inference.cache import Cache
from kvjax.inference.state import State
from kvjax.types import View


def layers(state: State) -> tuple[View, ...]:
    """The caches of a state whose heads have buffers of one size."""
    assert state.cache.pool is None
    return state.cache.slots


def unpacked(cache: Cache, steps: Any) -> list[np.ndarray]:
    """For each layer [n, b, h, c], from what `stored_positions` gave n times; -1 where there is no token."""
    if cache.pool is None:
        return [np.asarray(layer) for layer in steps]
    by_step = [cache.positions(step) for step in np.asarray(steps)]
    return [np.stack([layers[index] for layers in by_step]) for index in range(len(cache.layers))]


def kept(state: State, row: int) -> list[list[list[int]]]:
    """Positions that a row holds, sorted: [layer][KV head]."""
    return [[sorted(p for p in head if p >= 0) for head in layer[row].tolist()] for layer in state.cache.positions()]
