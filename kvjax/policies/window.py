"""Policies that look at positions alone."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from kvjax.policies.base import Policy, check
from kvjax.types import setting


@struct.dataclass(kw_only=True)
class Window(Policy):
    """The most recent tokens: the oldest leaves first (Longformer's sliding window as a cache)."""

    pages = True
    paper = "Beltagy et al. 2020, section 3.1"

    @property
    def slides(self):
        """Nothing else stays, unless it is protected for what it is."""
        return type(self).score is Window.score and not self.special

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


@struct.dataclass(kw_only=True)
class LambdaMask(Window):
    """The first tokens and the most recent ones, seen at their positions in the text.

    Args:
        sinks: first tokens that stay, 4 in LESS.
    """

    paper = "LM-Infinite, Han et al. 2023, section 3; LESS, arXiv 2402.09398, section 4"

    sinks: int = setting(4)


@struct.dataclass(kw_only=True)
class DilatedWindow(Policy):
    r"""A window with gaps: every (dilation + 1)-th token of the recent text and the newest one.

    .. math:: F(i) = i \ \text{if}\ i \equiv 0 \pmod{\text{dilation} + 1}, \ \text{else below all of these}

    The papers' pattern moves along with the query, so that each step needs tokens that the last one did not see. A
    cache cannot bring them back: here the pattern is fixed to the text, spans as far on the same slots, and a token in
    a gap is seen by its own query and leaves for the next token.

    Args:
        dilation: tokens left out between two that stay, from 0, which is `Window`; 1 in Keyformer's Figure 2.
    """

    paper = "Beltagy et al. 2020, section 3.1; Keyformer, arXiv 2403.09054, Figure 2(c)"

    dilation: int = setting(1)

    def __post_init__(self):
        super().__post_init__()
        check(isinstance(self.dilation, int) and self.dilation >= 0, "dilation", self.dilation, "a whole number from 0")

    def score(self, cache, new):
        """Score = position, lowered below zero in a gap (exact in float32 for the first 16 million tokens)."""
        position = cache.position.astype(jnp.float32)
        return jnp.where(cache.position % (self.dilation + 1) == 0, position, position - 2.0**24)
