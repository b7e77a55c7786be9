"""Which queries of a block of text each device reads, where several have the same heads and all of their slots."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.policies.quantizer import Operands
from kvjax.policies.stats import Ask, Sums
from kvjax.types import New, Spread
from pallas_kernels.attention import power_below, query_block
from pallas_kernels.prefill_scores import Own


class Share(NamedTuple):
    """The queries of a block that are read here: all of them, or by turns where several devices have all slots."""

    given: Operands
    new: New
    """For what is asked of these queries: of keys and values it has all."""
    token: Int[Array, " m"] | None
    """Which tokens of the block they are, the last one again in place of those beyond it; None for all."""
    size: int
    """Queries of a turn."""
    spread: Spread
    tokens: int
    """Of the block."""

    @classmethod
    def of(cls, given: Operands, new: New) -> Share:
        """Those of this device."""
        tokens = new.position.shape[1]
        # Some turns each, or who has the last one would have the most to do.
        size = min(query_block(tokens, new.q.shape[0]), power_below(max(1, tokens // (4 * new.spread.queries))))
        number = new.spread.own_queries(tokens, size)
        if number is None:
            return cls(given, new, None, size, new.spread, tokens)
        token = jnp.minimum(number, tokens - 1)
        position = jnp.where(number < tokens, new.position[:, token], -1)
        places = None if given.places is None else (given.places[0][:, :, token], given.places[1])
        share = given._replace(q=given.q[:, :, :, token], places=places)
        return cls(share, new.replace(q=share.q, position=position), token, size, new.spread, tokens)

    @property
    def own(self) -> Own | None:
        """The same, as the kernel takes it."""
        return None if self.token is None else Own(self.token, self.tokens)

    def weighed(self, ask: Ask) -> Ask:
        """A question about a whole block, about these queries."""
        if self.token is None or not isinstance(ask, Sums):
            return ask
        weights = None if ask.weights is None else ask.weights[..., self.token]
        tau = jnp.asarray(ask.tau)
        return ask.replace(weights=weights, tau=tau[:, self.token] if tau.ndim else ask.tau)

    def whole(self, own: Array, axis: int) -> Array:
        """What these queries have along an axis, of all queries."""
        return self.spread.all_queries(own, self.tokens, self.size, axis)
