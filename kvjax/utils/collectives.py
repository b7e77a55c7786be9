"""Sharding of a layer over devices, and the collectives between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

ROWS, HEADS, SLOTS = "rows", "heads", "slots"
"""Mesh axes of a program: rows of a batch, KV heads of a layer, slots of a head."""
REPLICATED: Any = PartitionSpec()
"""Spec of arrays that every device has."""
OF_ROWS: Any = PartitionSpec(ROWS)
"""Spec of arrays [b ...]."""
OF_HEADS: Any = PartitionSpec(ROWS, HEADS)
"""Spec of arrays [b h ...]."""
OF_SLOTS: Any = PartitionSpec(ROWS, HEADS, SLOTS)
"""Spec of arrays [b h c ...]."""
OF_POOL: Any = PartitionSpec((ROWS, HEADS))
"""Spec of arrays [P ...]: each device has its own pool of pages."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """Sharding and collectives of one device's program, inside `jax.shard_map` over `ROWS`, `HEADS` and `SLOTS`.

    Args:
        heads: devices that shard the KV heads of a layer, and their query heads.
        slots: devices that shard the slots of each head.
        queries: devices that shard the queries of a block of text; each of them has all slots.
        outputs: devices with the same heads that shard the inputs of the output weights.
        mlp: True if the columns of MLPs are sharded over all devices of a model.
        experts: True if the experts of a mixture are sharded over all devices of a model.
        vocab: True if the vocabulary is sharded over all devices of a model.
    """

    heads: int = 1
    slots: int = 1
    queries: int = 1
    outputs: int = 1
    mlp: bool = False
    experts: bool = False
    vocab: bool = False

    def over_heads(self, parts: Float[Array, "*b"]) -> Float[Array, "*b"]:
        """Sum over the devices that shard a layer's heads."""
        return jax.lax.psum(parts, HEADS) if self.heads > 1 else parts

    def over_slots(self, parts: Array) -> Array:
        """Sum over the devices that shard a head's slots."""
        return jax.lax.psum(parts, SLOTS) if self.slots > 1 else parts

    def most_of_slots(self, most: Array) -> Array:
        """Return the maximum over the devices that shard a head's slots."""
        return jax.lax.pmax(most, SLOTS) if self.slots > 1 else most

    def over_attention(self, parts: Float[Array, "*b"]) -> Float[Array, "*b"]:
        """Sum products of the output weights over the devices that shard their inputs, a layer's attention."""
        return jax.lax.psum(parts, (HEADS, SLOTS)) if self.outputs > 1 else self.over_heads(parts)

    def over_attention_and_heads(
        self, parts: Float[Array, "b t f"], means: Sequence[Float[Array, "b h c"]]
    ) -> tuple[Float[Array, "b t f"], list[Float[Array, "b h c"]]]:
        """Return `over_attention(parts)` and means over all heads of a layer, from one collective.

        `outputs` must be 1: the sum runs over `HEADS` only. `means` are over this device's heads, repeated for each.
        """
        rows, kind = parts.shape[0], jnp.result_type(parts, *means)
        told = [each.astype(kind) for each in (parts.reshape(rows, -1), *(mean[:, 0] for mean in means))]
        sent = jax.lax.psum(jnp.concatenate(told, axis=1), HEADS)
        sizes = [each.shape[1] for each in told]
        summed, *sums = jnp.split(sent, list(np.cumsum(sizes))[:-1], axis=1)
        heard = [
            jnp.broadcast_to(total[:, None] / self.heads, mean.shape).astype(mean.dtype)
            for total, mean in zip(sums, means, strict=True)
        ]
        return summed.reshape(parts.shape).astype(parts.dtype), heard

    def own_features(self, every: Float[Array, "*b f"]) -> Float[Array, "*b own"]:
        """Return those attention features of this device's heads that its output weights take."""
        return _shard(every, self.outputs, SLOTS, -1)

    def all_features(self, own: Float[Array, "b own"]) -> Float[Array, "b f"]:
        """Pad `own_features` to all features of the heads; those of other devices are zero."""
        if self.outputs == 1:
            return own
        count = own.shape[-1]
        none = jnp.zeros((*own.shape[:-1], count * self.outputs), own.dtype)
        return jax.lax.dynamic_update_slice_in_dim(none, own, jax.lax.axis_index(SLOTS) * count, axis=-1)

    def of_slots(
        self, told: Float[Array, "b n"], features: Float[Array, "b f"]
    ) -> tuple[Float[Array, "s b n"], Float[Array, "s b own"]]:
        """Gather arrays from the devices `s` that shard a head's slots, in one collective.

        Each device receives all of `told` from every other, and of their attention `features` its `own_features`.
        """
        rows, count = told.shape
        if self.outputs == 1:
            every = jax.lax.all_gather(jnp.concatenate([told, features], axis=-1), SLOTS)
        else:
            pieces = jnp.moveaxis(features.reshape(rows, self.outputs, -1), 1, 0)
            said = jnp.broadcast_to(told, (self.outputs, rows, count))
            every = jax.lax.all_to_all(jnp.concatenate([said, pieces], axis=-1), SLOTS, 0, 0)
        return every[..., :count], every[..., count:]

    def over_devices(self, parts: Float[Array, "*b"]) -> Float[Array, "*b"]:
        """Sum over all devices that shard the model."""
        return jax.lax.psum(parts, (HEADS, SLOTS))

    def first(self, heads: int) -> int | Int[Array, ""]:
        """Return the index of this device's first KV head in a layer, where each device has `heads` of them."""
        return jax.lax.axis_index(HEADS) * heads if self.heads > 1 else 0

    def all_heads(self, own: Array) -> Array:
        """Gather arrays [b h ...] of all heads from the devices that shard them."""
        return jax.lax.all_gather(own, HEADS, axis=1, tiled=True) if self.heads > 1 else own

    def all_slots(self, own: Array, axis: int = 2) -> Array:
        """Gather arrays of whole heads, along their axis of slots, from the devices that shard the slots."""
        return jax.lax.all_gather(own, SLOTS, axis=axis, tiled=True) if self.slots > 1 else own

    def own_slots(self, every: Array, axis: int = 2) -> Array:
        """Return this device's shard of the slots; the inverse of `all_slots`."""
        return _shard(every, self.slots, SLOTS, axis)

    def over_queries(self, parts: Float[Array, "*b"]) -> Float[Array, "*b"]:
        """Sum over the devices that shard a block's queries."""
        return jax.lax.psum(parts, SLOTS) if self.queries > 1 else parts

    def most_of_queries(self, most: Array) -> Array:
        """Return the maximum over the devices that shard a block's queries."""
        return jax.lax.pmax(most, SLOTS) if self.queries > 1 else most

    def own_queries(self, tokens: int, block: int) -> Int[Array, "m"] | None:
        """Return the indices of the tokens whose queries this device computes; None for all of them.

        Devices take blocks of consecutive tokens in turn. Later queries attend to more keys than earlier ones, so this
        balances the work. Indices beyond the last token fill the last turn.
        """
        if self.queries == 1:
            return None
        turns = -(-tokens // (block * self.queries))
        first = (jnp.arange(turns) * self.queries + jax.lax.axis_index(SLOTS)) * block
        return (first[:, None] + jnp.arange(block)).reshape(-1)

    def all_queries(self, own: Array, tokens: int, block: int, axis: int) -> Array:
        """Gather arrays of all tokens, along their axis of tokens, from each device's `own_queries`."""
        if self.queries == 1:
            return own
        turns = own.reshape(*own.shape[:axis], -1, block, *own.shape[axis + 1 :])
        every = jax.lax.all_gather(turns, SLOTS, axis=axis + 1)
        joined = every.reshape(*own.shape[:axis], -1, *own.shape[axis + 1 :])
        return jax.lax.slice_in_dim(joined, 0, tokens, axis=axis)

    def own_heads(self, every: Array) -> Array:
        """Return this device's shard of the heads; the inverse of `all_heads`."""
        return _shard(every, self.heads, HEADS, 1)


def _shard(every: Array, devices: int, name: str, axis: int) -> Array:
    if devices == 1:
        return every
    count = every.shape[axis] // devices
    return jax.lax.dynamic_slice_in_dim(every, jax.lax.axis_index(name) * count, count, axis)


ALONE = Spread()
"""Sharding of a single device."""
