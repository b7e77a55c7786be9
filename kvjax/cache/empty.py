"""Empty slots of one layer or of all layers, in dense buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from kvjax.policies.codec import Codec
from kvjax.types import LayerConfig, Reading, View


def empty_layers(
    policy: Any,
    configs: Sequence[LayerConfig],
    limits: Sequence[Int[Array, "b h"]],
    slots: Sequence[int],
    dtype: DTypeLike,
) -> tuple[View, ...]:
    """Create empty slots in each layer, for a policy `sized` before if its states depend on their number."""
    layers = enumerate(zip(configs, limits, slots, strict=True))
    return tuple(
        empty(policy.layer(layer), config, layer, limit=limit, slots=count, dtype=dtype)
        for layer, (config, limit, count) in layers
    )


def empty(
    policy: Any,
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
    lengths: dict[str, Any] = dict(prompt_length=each, read=each, horizon=each, end=each)
    reading = Reading(token=none, position=none, seed=each.astype(jnp.uint32), **lengths)
    shape = reading.ahead(config, layer, dtype)
    state = policy.init(shape)
    codec: Codec = policy.codec
    held = (codec.encode(shape, state.codec), policy.slots(shape, state))

    def room(leaf: Array) -> Array:
        return jnp.zeros((rows, heads, slots, *leaf.shape[3:]), leaf.dtype)

    kv, remembered = jax.tree.map(room, held)
    return View(limit, state, kv, jnp.full((rows, heads, slots), -1, jnp.int32), remembered)
