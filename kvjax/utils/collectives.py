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

    def most_of_slots(self, x: Array) -> Array:
        """Return the maximum over the devices that shard a head's slots."""
        return jax.lax.pmax(x, SLOTS) if self.slots > 1 else x

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
        flat = [x.astype(kind) for x in (parts.reshape(rows, -1), *(mean[:, 0] for mean in means))]
        sent = jax.lax.psum(jnp.concatenate(flat, axis=1), HEADS)
        sizes = [x.shape[1] for x in flat]
        summed, *sums = jnp.split(sent, list(np.cumsum(sizes))[:-1], axis=1)
        averages = [
            jnp.broadcast_to(total[:, None] / self.heads, mean.shape).astype(mean.dtype)
            for total, mean in zip(sums, means, strict=True)
        ]
        return summed.reshape(parts.shape).astype(parts.dtype), averages

    def own_features(self, features: Float[Array, "*b f"]) -> Float[Array, "*b own"]:
        """Return those attention features of this device's heads that its output weights take."""
        return _shard(features, self.outputs, SLOTS, -1)

    def all_features(self, local: Float[Array, "b own"]) -> Float[Array, "b f"]:
        """Pad `own_features` to all features of the heads; those of other devices are zero."""
        if self.outputs == 1:
            return local
        count = local.shape[-1]
        none = jnp.zeros((*local.shape[:-1], count * self.outputs), local.dtype)
        return jax.lax.dynamic_update_slice_in_dim(none, local, jax.lax.axis_index(SLOTS) * count, axis=-1)

    def of_slots(
        self, stats: Float[Array, "b n"], features: Float[Array, "b f"]
    ) -> tuple[Float[Array, "s b n"], Float[Array, "s b own"]]:
        """Gather arrays from the devices `s` that shard a head's slots, in one collective.

        Each device receives all of `stats` from every other, and of their attention `features` its `own_features`.
        """
        rows, count = stats.shape
        if self.outputs == 1:
            gathered = jax.lax.all_gather(jnp.concatenate([stats, features], axis=-1), SLOTS)
        else:
            pieces = jnp.moveaxis(features.reshape(rows, self.outputs, -1), 1, 0)
            repeated = jnp.broadcast_to(stats, (self.outputs, rows, count))
            gathered = jax.lax.all_to_all(jnp.concatenate([repeated, pieces], axis=-1), SLOTS, 0, 0)
        return gathered[..., :count], gathered[..., count:]

    def over_devices(self, parts: Float[Array, "*b"]) -> Float[Array, "*b"]:
        """Sum over all devices that shard the model."""
        return jax.lax.psum(parts, (HEADS, SLOTS))

    def first(self, heads: int) -> int | Int[Array, ""]:
        """Return the index of this device's first KV head in a layer, where each device has `heads` of them."""
        return jax.lax.axis_index(HEADS) * heads if self.heads > 1 else 0

    def all_heads(self, local: Array) -> Array:
        """Gather arrays [b h ...] of all heads from the devices that shard them."""
        return jax.lax.all_gather(local, HEADS, axis=1, tiled=True) if self.heads > 1 else local

    def all_slots(self, local: Array, axis: int = 2) -> Array:
        """Gather arrays of whole heads, along their axis of slots, from the devices that shard the slots."""
        return jax.lax.all_gather(local, SLOTS, axis=axis, tiled=True) if self.slots > 1 else local

    def own_slots(self, x: Array, axis: int = 2) -> Array:
        """Return this device's shard of the slots; the inverse of `all_slots`."""
        return _shard(x, self.slots, SLOTS, axis)

    def over_queries(self, parts: Float[Array, "*b"]) -> Float[Array, "*b"]:
        """Sum over the devices that shard a block's queries."""
        return jax.lax.psum(parts, SLOTS) if self.queries > 1 else parts

    def most_of_queries(self, x: Array) -> Array:
        """Return the maximum over the devices that shard a block's queries."""
        return jax.lax.pmax(x, SLOTS) if self.queries > 1 else x

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

    def all_queries(self, local: Array, tokens: int, block: int, axis: int) -> Array:
        """Gather arrays of all tokens, along their axis of tokens, from each device's `own_queries`."""
        if self.queries == 1:
            return local
        turns = local.reshape(*local.shape[:axis], -1, block, *local.shape[axis + 1 :])
        gathered = jax.lax.all_gather(turns, SLOTS, axis=axis + 1)
        in_order = gathered.reshape(*local.shape[:axis], -1, *local.shape[axis + 1 :])
        return jax.lax.slice_in_dim(in_order, 0, tokens, axis=axis)

    def own_heads(self, x: Array) -> Array:
        """Return this device's shard of the heads; the inverse of `all_heads`."""
        return _shard(x, self.heads, HEADS, 1)


def _shard(x: Array, devices: int, name: str, axis: int) -> Array:
    if devices == 1:
        return x
    count = x.shape[axis] // devices
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(name) * count, count, axis)


ALONE = Spread()
"""Sharding of a single device."""
