"""Buffers of dense caches: empty slots, rows, and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from kvjax.policies.policy import Policy
from kvjax.types import LayerConfig, PyTree, Reading, View

MORE_ROOM = "read the state with a larger budget, or more max_new_tokens if its slots depend on the length of the text"


def empty_layers(
    policy: Policy,
    configs: Sequence[LayerConfig],
    limits: Sequence[Int[Array, "b h"]],
    slots: Sequence[int],
    dtype: DTypeLike,
) -> tuple[View, ...]:
    """Create empty slots in each layer, for a policy `sized` before if its states depend on their number."""
    return tuple(
        empty(policy.layer(layer), config, layer, limit=limit, slots=count, dtype=dtype)
        for layer, (config, limit, count) in enumerate(zip(configs, limits, slots, strict=True))
    )


def empty(
    policy: Policy,
    config: LayerConfig,
    layer: int | Int[Array, ""],
    *,
    limit: Int[Array, "b h"],
    slots: int,
    dtype: DTypeLike,
) -> View:
    """Create empty slots for a layer."""
    rows, heads = limit.shape
    none, each = jnp.zeros((rows, 0), jnp.int32), jnp.zeros(rows, jnp.int32)
    lengths: dict[str, Any] = dict(prompt_length=each, read=each, horizon=each, end=each, rope_length=each)
    reading = Reading(token=none, position=none, seed=each.astype(jnp.uint32), **lengths)
    shape = reading.ahead(config, layer, dtype)
    state = policy.init(shape)
    held = (policy.codec.encode(shape, state.codec), policy.slots(shape, state))

    def room(leaf: Array) -> Array:
        return jnp.zeros((rows, heads, slots, *leaf.shape[3:]), leaf.dtype)

    kv, remembered = jax.tree.map(room, held)
    return View(limit, state, kv, jnp.full((rows, heads, slots), -1, jnp.int32), remembered)


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


def allocated_bytes(storage: PyTree) -> int:
    """Return the bytes of all arrays in caches: pairs, positions, scores, codes, states."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(storage))


def device_bytes(storage: PyTree) -> int:
    """Return the bytes that one device holds, from arrays or from shapes with a sharding."""
    shards = ((leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(storage))
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shards)


def slot_bytes(view: View) -> int:
    """Return the bytes of one slot of one head: its pair, its position and the policy's state for it."""
    slots = jax.tree.leaves((view.kv, view.position, view.slots))
    return sum(math.prod(leaf.shape[3:]) * leaf.dtype.itemsize for leaf in slots)
