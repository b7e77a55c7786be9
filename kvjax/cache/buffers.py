"""Buffers of dense caches: empty slots, rows, and bytes."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.types import PyTree, View

V = TypeVar("V", bound=View)

MORE_ROOM = "read the state with a larger budget, or more max_new_tokens if its slots depend on the length of the text"


def select_rows(cache: PyTree, index: Int[np.ndarray, " m"] | Int[Array, " m"]) -> Any:
    """Select rows of all arrays, in any order."""
    return jax.tree.map(lambda leaf: _to_space(_on_device(leaf)[index], _space(leaf)), cache)


def with_empty_slots(view: V, capacity: int) -> V:
    """Add empty slots to a layer, behind its own, up to so many per head."""
    more = max(capacity - view.capacity, 0)

    def padded(leaf: Array, value: int = 0) -> Array:
        return jnp.pad(leaf, [(0, 0), (0, 0), (0, more)] + [(0, 0)] * (leaf.ndim - 3), constant_values=value)

    kv, slots = jax.tree.map(padded, (view.kv, view.slots))
    return view.replace(kv=kv, slots=slots, position=padded(view.position, -1))


def replace_rows(cache: PyTree, index: Int[np.ndarray, " m"], rows: PyTree) -> Any:
    """Replace some rows of all arrays, in any order."""
    return jax.tree.map(
        lambda leaf, row: _to_space(_on_device(leaf).at[index].set(_on_device(row)), _space(leaf)), cache, rows
    )


def as_wide(view: V, rows: V, layer: int) -> V:
    """Return rows in buffers as large as those of `view`, which must not be smaller; `layer` is for the message."""
    if rows.capacity > view.capacity:
        raise ValueError(
            f"rows with {rows.capacity} slots per head in layer {layer} do not fit a state that has {view.capacity}; "
            f"{MORE_ROOM}."
        )
    rows = jax.tree.map(_on_device, rows)
    return with_empty_slots(rows, view.capacity).replace(state=jax.tree.map(_widened, view.state, rows.state))


def in_memory(view: V, space: Any) -> V:
    """Move a layer's score state and protection mask to host or device memory."""
    score, mask, state = jax.tree.map(
        lambda leaf: jax.device_put(leaf, space), (view.slots.score, view.slots.protection, view.state.score)
    )
    slots = view.slots.replace(score=score, protection=mask)
    return view.replace(slots=slots, state=view.state.replace(score=state))


def placed_like(leaf: Array, like: Array) -> Array:
    """Return an array in the memory of another one, of the host or the device."""
    return _to_space(leaf, _space(like))


def _on_device(leaf: Array) -> Array:
    """Return an array in device memory: rows can be gathered and scattered only there."""
    return _to_space(leaf, jax.memory.Space.Device)


def _to_space(leaf: Array, space: Any) -> Array:
    return leaf if _space(leaf) == space else jax.device_put(leaf, space)


def _space(leaf: Array) -> Any:
    return jax.typeof(leaf).memory_space


def _widened(larger: Array, rows: Array) -> Array:
    # States of heads may be allocated larger than those of `rows`.
    missing = [(0, size - fewer) for size, fewer in zip(larger.shape[1:], rows.shape[1:], strict=True)]
    if any(more < 0 for _, more in missing):
        raise ValueError(
            f"rows with a score state of shape {list(rows.shape[1:])} do not fit a state with "
            f"{list(larger.shape[1:])}; {MORE_ROOM}."
        )
    return jnp.pad(rows, [(0, 0), *missing])


def allocated_bytes(storage: PyTree) -> int:
    """Return the bytes of all arrays in caches: pairs, positions, scores, codes, states."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(storage))


def host_bytes(storage: PyTree) -> int:
    """Return the bytes of arrays in host memory."""
    return allocated_bytes([leaf for leaf in jax.tree.leaves(storage) if _space(leaf) == jax.memory.Space.Host])


def device_bytes(storage: PyTree) -> int:
    """Return the bytes that one device holds, from arrays or from shapes with a sharding."""
    shards = ((leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(storage))
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shards)


def slot_bytes(view: View) -> int:
    """Return the bytes of one slot of one head: its pair, its position and the policy's state for it."""
    slots = jax.tree.leaves((view.kv, view.position, view.slots))
    return sum(math.prod(leaf.shape[3:]) * leaf.dtype.itemsize for leaf in slots)
