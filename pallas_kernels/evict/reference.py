"""Eviction in XLA: one scatter for each buffer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import after
from pallas_kernels.ranking import Protection, victim


def evict(
    scores: Float[Array, "b h c"],
    position: Int[Array, "b h c"],
    new_position: Int[Array, " b"],
    buffers: Any,
    added: Any,
    *,
    protection: Protection,
    keep: Bool[Array, "b h c"] | None,
    shrinks: bool,
) -> tuple[Array, Array, Any, Array, Any]:
    """See `api.evict`."""
    rows, heads, capacity = position.shape
    newest = new_position[:, None, None]
    sinks, recent, limit = (x[..., None] for x in protection)
    slot = victim(scores, position, newest, sinks, recent, limit, keep, shrinks=shrinks)[..., 0]
    row, head = jnp.arange(rows)[:, None], jnp.arange(heads)[None]
    taken = jax.tree.map(lambda leaf: leaf[row, head, slot], {"position": position, "buffers": buffers})
    slot = after(jnp.where(newest[..., 0] >= 0, slot, capacity), taken)

    def write(leaf: Array, value: Array) -> Array:
        return leaf.at[row, head, slot].set(value.astype(leaf.dtype), unique_indices=True, mode="drop")

    position = write(position, jnp.broadcast_to(new_position[:, None], slot.shape))
    buffers = jax.tree.map(write, buffers, added)
    left = jnp.where(newest[..., 0] >= 0, taken["position"], -1)
    return slot, left, taken["buffers"], position, buffers
