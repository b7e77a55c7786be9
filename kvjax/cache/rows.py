"""Rows of dense caches: select some, or replace them by rows of another cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.types import PyTree, View

MORE_ROOM = "read the state with a larger budget, or more max_new_tokens if its slots depend on the length of the text"


def select_rows(cache: PyTree, index: Int[np.ndarray, " m"] | Int[Array, " m"]) -> Any:
    """Select rows of all arrays, in any order."""
    return jax.tree.map(lambda leaf: _moved(_on_device(leaf)[index], _space(leaf)), cache)


def with_empty_slots(view: View, capacity: int) -> View:
    """Add empty slots to a layer, behind its own, up to so many per head."""
    more = max(capacity - view.capacity, 0)

    def padded(leaf: Array, value: int = 0) -> Array:
        return jnp.pad(leaf, [(0, 0), (0, 0), (0, more)] + [(0, 0)] * (leaf.ndim - 3), constant_values=value)

    kv, slots = jax.tree.map(padded, (view.kv, view.slots))
    return view.replace(kv=kv, slots=slots, position=padded(view.position, -1))


def replace_rows(layers: tuple[View, ...], index: Int[np.ndarray, " m"], rows: tuple[View, ...]) -> tuple[View, ...]:
    """Replace some rows of all layers; buffers may be larger than those of `rows`, but not smaller."""
    replaced: list[View] = []
    for number, (mine, theirs) in enumerate(zip(layers, rows, strict=True)):
        room, wanted, theirs = mine.capacity, theirs.capacity, jax.tree.map(_on_device, theirs)
        if wanted > room:
            raise ValueError(
                f"rows with {wanted} slots per head in layer {number} do not fit a state that has {room}; {MORE_ROOM}."
            )

        padded = with_empty_slots(theirs, room).replace(state=jax.tree.map(_widened, mine.state, theirs.state))
        replaced.append(
            jax.tree.map(lambda old, row: _moved(_on_device(old).at[index].set(row), _space(old)), mine, padded)
        )
    return tuple(replaced)


def _on_device(leaf: Array) -> Array:
    """Return an array in device memory: rows can be gathered and scattered only there."""
    return _moved(leaf, jax.memory.Space.Device)


def _moved(leaf: Array, space: Any) -> Array:
    return leaf if _space(leaf) == space else jax.device_put(leaf, space)


def _space(leaf: Array) -> Any:
    return jax.typeof(leaf).memory_space


def _widened(mine: Array, theirs: Array) -> Array:
    # States of heads may be allocated larger than those of `theirs`.
    missing = [(0, room - some) for room, some in zip(mine.shape[1:], theirs.shape[1:], strict=True)]
    if any(more < 0 for _, more in missing):
        raise ValueError(
            f"rows with a score state of shape {list(theirs.shape[1:])} do not fit a state with "
            f"{list(mine.shape[1:])}; {MORE_ROOM}."
        )
    return jnp.pad(theirs, [(0, 0), *missing])
