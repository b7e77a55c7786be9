"""Query shards: the queries of a block that each device computes if several devices hold the same slots."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.policies.codec import Operands
from kvjax.policies.stats import Ask, Damage, Peak, Sums
from kvjax.types import New, Spread
from pallas_kernels.attention import power_below, query_block
from pallas_kernels.prefill_scores import Own


class Share(NamedTuple):
    """Queries of a block that this device computes: all, or every n-th run if n devices hold the same slots."""

    given: Operands
    new: New
    """These queries with their positions, and the keys and values of the whole block."""
    token: Int[Array, " m"] | None
    """Indices of these queries in the block, where the last one replaces those beyond the block; None for all."""
    size: int
    """Queries in a run."""
    spread: Spread
    tokens: int
    """Tokens of the block."""

    @classmethod
    def of(cls, given: Operands, new: New) -> Share:
        """Return the queries of this device."""
        tokens = new.position.shape[1]
        # Give each device several runs: later queries see more keys, so the last run takes longest.
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
        """Tokens of these queries, in the form of the kernel's argument; None for all of them."""
        return None if self.token is None else Own(self.token, self.tokens)

    def weighed(self, ask: Ask) -> Ask:
        """Restrict a request about a whole block to these queries."""
        if self.token is None or not isinstance(ask, Sums | Damage | Peak):
            return ask
        weights = None if ask.weights is None else ask.weights[..., self.token]
        if not isinstance(ask, Sums):
            return ask.replace(weights=weights)
        tau = jnp.asarray(ask.tau)
        return ask.replace(weights=weights, tau=tau[:, self.token] if tau.ndim else ask.tau)

    def whole(self, own: Array, axis: int) -> Array:
        """Gather an array over all queries from the devices' arrays, along an axis."""
        return self.spread.all_queries(own, self.tokens, self.size, axis)
