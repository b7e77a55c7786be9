"""The bytes that caches take."""

from __future__ import annotations

import jax

from kvjax.types import PyTree


def allocated_bytes(storage: PyTree) -> int:
    """Bytes of the arrays that make up caches, whatever they store: pairs, positions, scores, codes, states."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(storage))
