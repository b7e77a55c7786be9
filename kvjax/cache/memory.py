"""Bytes of caches."""

from __future__ import annotations

import math

import jax

from kvjax.types import PyTree, View


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
