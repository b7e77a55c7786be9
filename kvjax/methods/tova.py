"""TOVA (Oren et al. 2024, section 4): evict the token with the least attention from the newest query."""

from __future__ import annotations

from kvjax.methods.register import register_score
from kvjax.policies import AttentionSum, Requirements, StoredScore
from kvjax.types import Heads, LayerTokens, wide


@register_score("tova", paper="TOVA, 4", group="ranked by attention at every token", recent=1)
class LastAttention(StoredScore):
    r"""Last attention, one score for all heads of a layer.

    .. math:: F_t(i) = \frac{1}{H} \sum_{h} a_{t,h}(i)

    averaged over the H query heads of the layer, for the newest query only.

    When: for questions about a long prompt. It finds a needle in the middle of 1,024 tokens with half (4 of 4) and a
    quarter of the slots (2 of 4), where `h2o` finds none. For continuing text `h2o` is better.
    """

    @property
    def requires(self) -> Requirements:
        """One score for all heads of a layer, which hold the same tokens."""
        return Requirements(shared_slots="heads")

    def attention_stats(self, heads: Heads, new: LayerTokens) -> AttentionSum:
        """Request a_t of the newest token, a mean over the layer's heads of sums over query groups."""
        last = (new.position == new.newest[:, None]) & new.valid
        return AttentionSum(
            last[:, None].astype(wide(new.q.dtype)) if new.position.shape[1] > 1 else None, over="layer"
        )
