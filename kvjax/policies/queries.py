"""Statistics of the queries of prompts and turns, for scores that estimate later queries from them."""

from __future__ import annotations

import abc
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from kvjax.policies.score import PromptScore
from kvjax.rope import Turns, rotate_by, turns_of
from kvjax.types import Heads, LayerTokens, View, setting, wide
from kvjax.utils.fields import at_least


class QueryMoments(struct.PyTreeNode):
    """Mean and covariance of the queries of prompts and turns, before rotation."""

    count: Float[Array, "b h"]
    mean: Float[Array, "b h g d"]
    spread: Float[Array, "b h g d d"] | None
    """The covariance, times the count; None if it is not needed."""

    @staticmethod
    def none(shape: LayerTokens, *, covariance: bool = True) -> QueryMoments:
        """Return the moments of no queries, with or without their covariance."""
        zero = jnp.zeros((*shape.q.shape[:3], shape.q.shape[-1]), wide(shape.q.dtype))
        return QueryMoments(zero[:, :, 0, 0], zero, zero[..., None] * zero[..., None, :] if covariance else None)

    def updated(self, new: LayerTokens, sinks: int) -> QueryMoments:
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


def rotated_ahead(x: Float[Array, "b h g d"], new: LayerTokens, future: int) -> Float[Array, "b h g d"]:
    """Return the mean of vectors rotated to each of the next `future` positions."""
    rope = new.config.rope
    if rope is None:
        return x
    turns = turns_of(rope, new.read[:, None] + jnp.arange(future), x.dtype, new.rope_length)
    return rotate_by(rope, x, Turns(*(table.mean(-2)[:, None, None] for table in turns)))


class Expected(NamedTuple):
    """A head at the end of given text, and the queries that it expects."""

    keys: Float[Array, "b h c d"]
    values: Float[Array, "b h c e"]
    counts: Bool[Array, "b h c"]
    """Mask of the tokens past the first positions."""
    mean: Float[Array, "b h g d"]
    """Mean of the queries at the next positions."""
    spread: Float[Array, "b h g d d"] | None
    """Their covariance; None if it is not needed."""


class MomentScore(PromptScore, interface=True):
    """Score of given text by the queries at the next positions, which are expected to be like the given ones.

    Args:
        sinks: first positions, which count neither as queries nor as keys.
        future: next positions over which rotations are averaged.
    """

    covariance: ClassVar[bool] = True

    sinks: int = setting(4)
    future: int = setting(512, at_least(1, "a number of positions"))

    def init_head(self, shape: LayerTokens) -> QueryMoments:
        return QueryMoments.none(shape, covariance=self.covariance)

    def update_head(self, heads: Heads, new: LayerTokens) -> QueryMoments:
        return heads.state.score.updated(new, self.sinks)

    def _ranked(self, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        moments, kind = self.update_head(view, new), wide(new.k.dtype)
        spread = moments.spread
        if spread is not None:
            rows = jax.vmap(lambda x: rotated_ahead(x, new, self.future), -2, -2)
            spread = rows(jnp.swapaxes(rows(spread), -1, -2))
            spread /= jnp.maximum(moments.count, 1.0)[..., None, None, None]
        counts = view.live & (view.position >= self.sinks)
        mean = rotated_ahead(moments.mean, new, self.future)
        of = Expected(view.keys(new).astype(kind), view.values(new).astype(kind), counts, mean, spread)
        return self._expected(of, view, new)

    @abc.abstractmethod
    def _expected(self, of: Expected, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        """Return the score of each slot at the end of given text."""
