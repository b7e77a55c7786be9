"""Random eviction: the control that a method has to beat."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from kvjax.policies.base import Policy
from kvjax.types import setting
from pallas_kernels.noise import uniform_at


@struct.dataclass(kw_only=True)
class Random(Policy):
    """A uniformly random subset of the text at every step: each token draws one priority, the lowest leaves.

    Args:
        recent: newest tokens that stay, so that the sentence being written is not torn.
    """

    pages = True
    paper = "control"

    recent: int | float = setting(0)

    def stats(self, new, state):
        """One priority per layer, head and token."""
        return uniform_at(new.seed, new.layer, jnp.broadcast_to(new.position[:, None], new.k.shape[:3]))

    def score(self, cache, new):
        """Score = priority."""
        return cache.stats
