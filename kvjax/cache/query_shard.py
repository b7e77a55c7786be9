"""Queries of a block of text that one device computes."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.policies.codec import Operands
from kvjax.policies.stats import AttentionSum, Damage, Peak, StatRequest
from kvjax.types import LayerTokens
from pallas_kernels.attention import power_below, query_block
from pallas_kernels.prefill_attention import QueryTokens


class QueryShard(NamedTuple):
    """Queries of a block that this device computes: all, or every n-th run if n devices hold the same slots."""

    operands: Operands
    new: LayerTokens
    """These queries with their positions, and the keys and values of the whole block."""
    token: Int[Array, " m"] | None
    """Indices of these queries in the block, where the last one replaces those beyond the block; None for all."""
    size: int
    """Queries in a run."""
    total: int
    """Queries on all devices: those of all tokens of the block, or of its last tokens."""

    @classmethod
    def of(cls, operands: Operands, new: LayerTokens) -> QueryShard:
        """Return the queries of this device."""
        tokens = new.position.shape[1]
        # Give each device several runs: later queries see more keys, so the last run takes longest.
        size = min(query_block(tokens, new.q.shape[0]), power_below(max(1, tokens // (4 * new.spread.queries))))
        number = new.spread.own_queries(tokens, size)
        if number is None:
            return cls(operands, new, None, size, tokens)
        token = jnp.minimum(number, tokens - 1)
        position = jnp.where(number < tokens, new.position[:, token], -1)
        places = None if operands.places is None else (operands.places[0][:, :, token], operands.places[1])
        share = operands._replace(q=operands.q[:, :, :, token], places=places)
        return cls(share, new.replace(q=share.q, position=position), token, size, tokens)

    @property
    def query_tokens(self) -> QueryTokens | None:
        """Tokens of these queries in the block; None for all of its tokens."""
        tokens = self.new.k.shape[2]
        if self.token is None and self.total == tokens:
            return None
        index = jnp.arange(self.total) if self.token is None else self.token
        return QueryTokens(index + tokens - self.total, tokens)

    def weighed(self, request: StatRequest) -> StatRequest:
        """Restrict a request about a whole block to these queries."""
        if self.token is None or not isinstance(request, AttentionSum | Damage | Peak):
            return request
        weights = None if request.weights is None else request.weights[..., self.token]
        if not isinstance(request, AttentionSum):
            return request.replace(weights=weights)
        tau = jnp.asarray(request.tau)
        return request.replace(weights=weights, tau=tau[:, self.token] if tau.ndim else request.tau)

    def gather(self, shard: Array, axis: int) -> Array:
        """Gather an array over all queries from the devices' arrays, along an axis."""
        return self.new.spread.all_queries(shard, self.total, self.size, axis)
