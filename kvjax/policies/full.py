"""Nothing leaves: the reference that every other policy is measured against."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from kvjax.policies.base import Policy


@struct.dataclass(kw_only=True)
class Full(Policy):
    """Keep every token of the prompt and of `max_new_tokens`; beyond that, logits are NaN.

    Args:
        sinks, recent, special, positions: as in every policy, without effect on what is kept.
    """

    evicts = False
    paper = "the full cache"

    def score(self, cache, new):
        """Never asked for: there is always room."""
        return jnp.where(cache.position >= 0, jnp.inf, 0.0)
