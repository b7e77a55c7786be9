"""H2O: tokens that have gathered most attention, and the most recent ones."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from kvjax.policies.base import Policy
from kvjax.types import Weighing, setting, wide


@struct.dataclass(kw_only=True)
class H2O(Policy):
    r"""Heavy hitters by accumulated attention.

    .. math:: F_t(i) = \sum_{j \le t} \sum_{g} a_{j,g}(i)

    summed over all queries j that saw token i, prompt and generation, and over the g query heads of the KV head.

    Args:
        recent: share of the budget for the most recent tokens, half in the paper.
    """

    needs_probs = True
    pages = True
    paper = "H2O, Zhang et al. 2023, Algorithm 1"

    recent: int | float = setting(0.5)

    def stats(self, new, state):
        """Accumulated attention, nothing yet."""
        return jnp.zeros(new.k.shape[:3], wide(new.k.dtype))

    def observe(self, cache, probs, new):
        """F_t = F_{t-1} + a_t."""
        return cache.replace(stats=cache.stats + probs.sum((2, 3)))

    def wants(self, new):
        """a_t, summed over the group."""
        return "sum"

    def weighing(self, cache, new):
        """Every query counts."""
        return Weighing()

    def summed(self, cache, sums, new):
        """F_t, given the sum over queries."""
        return cache.replace(stats=cache.stats + sums.sum(2))

    def score(self, cache, new):
        """Score = F_t."""
        return cache.stats
