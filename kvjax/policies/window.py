"""Policies that look at positions alone."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from kvjax.policies.base import Policy
from kvjax.types import setting


@struct.dataclass(kw_only=True)
class Window(Policy):
    """The most recent tokens: the oldest leaves first (Longformer's sliding window as a cache)."""

    paper = "Beltagy et al. 2020, section 3.1"

    def score(self, cache, new):
        """Score = position."""
        return cache.position.astype(jnp.float32)


@struct.dataclass(kw_only=True)
class Streaming(Window):
    """The first tokens and the most recent ones, seen at their positions in the cache.

    Args:
        sinks: first tokens that stay and soak up attention, 4 in the paper.
    """

    paper = "StreamingLLM, Xiao et al. 2024, section 3.2"

    sinks: int = setting(4)
    positions: str = setting("cache")
