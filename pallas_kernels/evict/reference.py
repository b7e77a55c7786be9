"""Eviction in XLA: one scatter for each buffer, or a select for some buffers on CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.evict.api import Evict
from pallas_kernels.op import Options, platform_of
from pallas_kernels.ranking import victim


def evict(x: Evict, _: Options) -> tuple[Array, Array, Any, Array, Any]:
    sinks, recent, limit = (rule[..., None] for rule in x.protection)
    newest = x.new_position[:, None, None]
    slot = victim(x.scores, x.position, newest, sinks, recent, limit, x.keep, shrinks=x.shrinks)[..., 0]
    return replace_slots(slot, x.position, x.new_position, x.buffers, x.added, pairs=x.pairs)


def replace_slots(
    slot: Int[Array, "b h"],
    position: Int[Array, "b h c"],
    new_position: Int[Array, " b"],
    buffers: Any,
    added: Any,
    *,
    pairs: bool = True,
) -> tuple[Array, Array, Any, Array, Any]:
    """Run `api.evict` with a given slot of each head."""
    rows, heads, capacity = position.shape
    row, head = jnp.arange(rows)[:, None], jnp.arange(heads)[None]
    writes = new_position[:, None] >= 0
    at: dict[str, Any] = dict(unique_indices=True, wrap_negative_indices=False)
    contents = position, buffers if pairs else None
    evicted_position, evicted = contents = jax.tree.map(lambda leaf: leaf.at[row, head, slot].get(**at), contents)
    slot = after_reading(jnp.where(writes, slot, capacity), contents)
    on_cpu = platform_of(None) == "cpu"

    def write(leaf: Array, value: Array) -> Array:
        # XLA on CPU compiles each scatter separately, and would convert a whole bfloat16 buffer to float32 and back.
        if on_cpu and (leaf.ndim == 3 or leaf.dtype == jnp.bfloat16):
            return write_slots(leaf, slot, value)
        return leaf.at[row, head, slot].set(value.astype(leaf.dtype), mode="drop", **at)

    position = write(position, jnp.broadcast_to(new_position[:, None], slot.shape))
    buffers = jax.tree.map(write, buffers, added)
    return slot, jnp.where(writes, evicted_position, -1), evicted, position, buffers


def write_slots(leaf: Array, slot: Int[Array, "b h"], value: Array) -> Array:
    """Write an entry [b h ...] into a slot of each head of a buffer [b h c ...], slot by slot without a scatter.

    A slot of c or more writes nothing.
    """
    is_slot = jnp.arange(leaf.shape[2], dtype=slot.dtype) == slot[..., None]
    spread = is_slot.reshape(*is_slot.shape, *(1,) * (leaf.ndim - 3))
    return jnp.where(spread, value[:, :, None].astype(leaf.dtype), leaf)


def after_reading(slot: Int[Array, "b h"], contents: Any) -> Int[Array, "b h"]:
    """Return the same slots, made to depend on the contents that were read from them.

    XLA on CPU copies whole buffers unless the read of their old contents must precede the write into them. It drops
    optimization barriers, so a zero that it cannot simplify away orders them.
    """
    for leaf in jax.tree.leaves(contents):
        bits = leaf == leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf & 1
        slot = slot + jnp.minimum(bits.astype(jnp.int32).reshape(*slot.shape, -1).sum(-1), 0)
    return slot
