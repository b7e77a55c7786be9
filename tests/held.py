"""Which tokens a state holds, whichever way its caches are stored."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from kvjax.cache.dense import Dense
from kvjax.engine.state import State, Storage
from kvjax.types import View


def layers(state: State) -> tuple[View, ...]:
    """The caches of a state whose heads have buffers of one size."""
    assert isinstance(state.storage, Dense)
    return state.storage.layers


def unpacked(storage: Storage, steps: Any) -> list[np.ndarray]:
    """For each layer [n, b, h, c], from what `stored_positions` gave n times; -1 where there is no token."""
    count = len(jax.tree.leaves(steps)[0])
    moments = [jax.tree.map(lambda leaf, step=step: leaf[step], steps) for step in range(count)]
    return [np.stack(layer) for layer in zip(*map(storage.positions, moments), strict=True)]
