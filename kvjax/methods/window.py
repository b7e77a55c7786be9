"""Sliding windows (Beltagy et al. 2020, section 3.1), with and without gaps: scores by position only."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.methods.register import register_score
from kvjax.policies import AgeScore, Score
from kvjax.types import LayerTokens, View, at_least, number


@register_score("window", paper="Longformer, 3.1", group="ranked by position")
class Recency(AgeScore):
    r"""Keep the most recent tokens: the oldest is evicted first (Longformer's sliding window as a cache).

    .. math:: F(i) = i

    When: as a control. SmolLM2 needs its first tokens: at a quarter of the slots its perplexity is 36.8 here and 17.3
    under `lambda_mask`, which also keeps the first four.
    """


@register_score("dilated_window", paper="Longformer, 3.1; Keyformer, Figure 2c", group="ranked by position")
class Dilated(Score):
    r"""Window with gaps: every (dilation + 1)-th token of the recent text and the newest one.

    .. math:: F(i) = i \ \text{if}\ i \equiv 0 \pmod{\text{dilation} + 1}, \ \text{else below all of these}

    The papers' pattern moves with the query, so each step needs tokens that earlier steps skipped. A cache cannot
    recover evicted tokens. Here the pattern is fixed in the text. It spans the same distance with the same slots, and a
    token in a gap is visible to its own query and then replaced by the next token.

    When: as a control, in addition to `window`. SmolLM2 does not tolerate gaps: its perplexity is 222 at a quarter of
    the slots, and 36.8 under `window` (WikiText-2).

    Args:
        dilation: number of tokens skipped between two kept ones, at least 0; 0 is `Recency`, 1 is Keyformer's Figure 2.
    """

    dilation: int = number(1, at_least(0, "a whole number"))

    def score(self, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        """Return the position, lowered below zero in a gap (exact in float32 for the first 16 million tokens)."""
        position = view.position.astype(jnp.float32)
        return jnp.where(view.position % (self.dilation + 1) == 0, position, position - 2.0**24)
