"""Statistics of the queries of prompts and turns, for scores that estimate later queries from them."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from kvjax.rope import Turns, rotate_by, turns_of
from kvjax.types import New, wide


class QueryMoments(struct.PyTreeNode):
    """Mean and covariance of the queries of prompts and turns, before rotation."""

    count: Float[Array, "b h"]
    mean: Float[Array, "b h g d"]
    spread: Float[Array, "b h g d d"] | None
    """The covariance, times the count; None if it is not needed."""

    @staticmethod
    def none(shape: New, *, covariance: bool = True) -> QueryMoments:
        """Return the moments of no queries, with or without their covariance."""
        zero = jnp.zeros((*shape.q.shape[:3], shape.q.shape[-1]), wide(shape.q.dtype))
        return QueryMoments(zero[:, :, 0, 0], zero, zero[..., None] * zero[..., None, :] if covariance else None)

    def joined(self, new: New, sinks: int) -> QueryMoments:
        """Return the moments with the queries of new text, those of the first `sinks` positions left out."""
        counts = new.valid & (new.position >= sinks)
        raw, weight = new.raw_q.astype(self.mean.dtype), counts.astype(self.mean.dtype)
        added = jnp.broadcast_to(weight.sum(1)[:, None], self.count.shape)
        mean = jnp.einsum("bhgtd,bt->bhgd", raw, weight) / jnp.maximum(added, 1.0)[..., None, None]
        share = added / jnp.maximum(self.count + added, 1.0)
        step = mean - self.mean
        spread = self.spread
        if spread is not None:
            off = (raw - mean[:, :, :, None]) * weight[:, None, None, :, None]
            spread = spread + jnp.einsum("bhgti,bhgtj->bhgij", off, off)
            spread += jnp.einsum("bh,bhgi,bhgj->bhgij", self.count * share, step, step)
        return QueryMoments(self.count + added, self.mean + share[..., None, None] * step, spread)


def turned_ahead(x: Float[Array, "b h g d"], new: New, future: int) -> Float[Array, "b h g d"]:
    """Return the mean of vectors rotated to each of the next `future` positions."""
    if new.config is None or new.config.rope is None:
        return x
    rope = new.config.rope
    turns = turns_of(rope, new.read[:, None] + jnp.arange(future), x.dtype, new.end)
    return rotate_by(rope, x, Turns(*(each.mean(-2)[:, None, None] for each in turns)))
