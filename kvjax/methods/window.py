"""Sliding windows, with gaps and without: scores that look at positions alone."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from kvjax.methods.combine import combine
from kvjax.methods.register import register
from kvjax.policies.policy import Policy
from kvjax.policies.rankings import OldestFirst
from kvjax.policies.score import Score
from kvjax.types import New, View, check, number, written


@struct.dataclass
class Recency(Score):
    r"""The most recent tokens: the oldest leaves first (Longformer's sliding window as a cache).

    .. math:: F(i) = i
    """

    paper = "Beltagy et al. 2020, section 3.1"

    def score(self, view: View, new: New) -> OldestFirst:
        """Rank by position."""
        return OldestFirst()


@struct.dataclass
class Dilated(Score):
    r"""A window with gaps: every (dilation + 1)-th token of the recent text and the newest one.

    .. math:: F(i) = i \ \text{if}\ i \equiv 0 \pmod{\text{dilation} + 1}, \ \text{else below all of these}

    The papers' pattern moves along with the query, so that each step needs tokens that the last one did not see. A
    cache cannot bring them back: here the pattern is fixed to the text, spans as far on the same slots, and a token in
    a gap is seen by its own query and leaves for the next token.

    Args:
        dilation: tokens left out between two that stay, from 0, which is `Recency`; 1 in Keyformer's Figure 2.
    """

    paper = "Beltagy et al. 2020, section 3.1; Keyformer, arXiv 2403.09054, Figure 2(c)"

    dilation: int = number(1)

    def __post_init__(self) -> None:
        whole = isinstance(self.dilation, int) and self.dilation >= 0
        check(whole or not written(self.dilation), "dilation", self.dilation, "a whole number from 0")

    def score(self, view: View, new: New) -> Float[Array, "b h c"]:
        """Score = position, lowered below zero in a gap (exact in float32 for the first 16 million tokens)."""
        position = view.position.astype(jnp.float32)
        return jnp.where(view.position % (self.dilation + 1) == 0, position, position - 2.0**24)


@register(paper="Longformer, 3.1", group="ranked by position")
def window(**common: Any) -> Policy:
    """Keep the most recent tokens: the oldest leaves first (Longformer's sliding window as a cache).

    When: as a control. SmolLM2 leans on its first tokens: at a quarter of the slots its perplexity is 36.8 here and
    17.3 under `lambda_mask`, which holds four of them besides.
    """
    return combine(Recency(), **common)


@register(paper="Longformer, 3.1; Keyformer, Figure 2c", group="ranked by position")
def dilated_window(*, dilation: int = Dilated.dilation, **common: Any) -> Policy:
    """Keep a window with gaps: every (dilation + 1)-th token of the recent text and the newest one.

    When: as a control, beside `window`. SmolLM2 cannot do with gaps: its perplexity is 222 at a quarter of the slots
    (WikiText-2), where `window` has 36.8.
    """
    return combine(Dilated(dilation), **common)
