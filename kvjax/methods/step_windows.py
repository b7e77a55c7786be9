"""Sums over windows of queries; a new window begins every few tokens."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.types import LayerTokens, wide


def begin(new: LayerTokens, width: int) -> Int[Array, " b"]:
    """Return the position of the first query of the window that is being filled: a multiple of its width."""
    return new.newest // width * width


def ended(new: LayerTokens, width: int) -> Int[Array, "b 1 1"]:
    """Return the number of windows that ended between the token before the new ones and the newest token."""
    return (new.newest // width - (new.position[:, 0] - 1) // width)[:, None, None]


def shifted(sums: tuple[Float[Array, "b h c"], ...], windows: Int[Array, "b #h 1"]) -> tuple[Array, ...]:
    """Return the sums of as many windows, the oldest first, after some windows have ended: new ones begin at 0."""
    output = []
    for place in range(len(sums)):
        total = jnp.zeros_like(sums[place])
        for later in range(place, len(sums)):
            total = jnp.where(windows == later - place, sums[later], total)
        output.append(total)
    return tuple(output)


def weights(queries: Bool[Array, "b t"], new: LayerTokens) -> Float[Array, "b 1 t"]:
    """Return weights of 1 for some of the new queries, and of 0 for the others and for padding."""
    return (queries & new.valid)[:, None].astype(wide(new.q.dtype))
