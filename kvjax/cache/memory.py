"""The bytes that caches take."""

from __future__ import annotations

import math

import jax

from kvjax.types import PyTree, View


def allocated_bytes(storage: PyTree) -> int:
    """Bytes of the arrays that make up caches, whatever they store: pairs, positions, scores, codes, states."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(storage))


def device_bytes(storage: PyTree) -> int:
    """Bytes of these that one device has, from arrays or from shapes that say where they lie."""
    shards = ((leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(storage))
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shards)


def slot_bytes(view: View) -> int:
    """Bytes of one slot of one head: its pair, its position and what the parts of a policy remember of it."""
    slots = jax.tree.leaves((view.kv, view.position, view.slots))
    return sum(math.prod(leaf.shape[3:]) * leaf.dtype.itemsize for leaf in slots)
