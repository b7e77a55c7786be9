"""Operations on the slots of a head in the order of the text, for scores that pool over neighbors."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax.lax import reduce_window
from jaxtyping import Array, Float, Int


def text_order(position: Int[Array, "b h c"]) -> Int[Array, "b h c"]:
    """Return the slots in the order of their positions, empty ones (-1) last."""
    return jnp.argsort(jnp.where(position >= 0, position, jnp.iinfo(jnp.int32).max), axis=-1)


def in_text_order(
    change: Callable[[Float[Array, "b h c"]], Float[Array, "b h c"]],
    x: Float[Array, "b h c"],
    position: Int[Array, "b h c"],
) -> Float[Array, "b h c"]:
    """Apply a function to values of slots in the order of their positions, those of empty slots last."""
    order = text_order(position)
    changed = change(jnp.take_along_axis(x, order, axis=-1))
    return jnp.take_along_axis(changed, jnp.argsort(order, axis=-1), axis=-1)


def pooled(x: Float[Array, "b h c"], kernel: int, pooling: str = "average") -> Float[Array, "b h c"]:
    """Return the average or `max` of an odd number of neighbors; the average counts zeros beyond the ends."""
    sizes, pads = (1, 1, kernel), ((0, 0), (0, 0), (kernel // 2, kernel // 2))
    if pooling == "max":
        return reduce_window(x, jnp.array(-jnp.inf, x.dtype), jnp.maximum, sizes, (1, 1, 1), pads)
    return reduce_window(x, jnp.zeros((), x.dtype), jnp.add, sizes, (1, 1, 1), pads) / kernel
