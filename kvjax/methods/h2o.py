"""H2O (Zhang et al. 2023, Algorithm 1): tokens with the most accumulated attention."""

from __future__ import annotations

from kvjax.methods.register import register_score
from kvjax.policies import AccumulatedScore, AttentionSum
from kvjax.types import Heads, LayerTokens


@register_score("h2o", paper="H2O, Algorithm 1", group="ranked by attention at every token", recent=0.5)
class Accumulated(AccumulatedScore):
    r"""Heavy hitters by accumulated attention.

    .. math:: F_t(i) = \sum_{j \le t} \sum_{g} a_{j,g}(i)

    summed over all queries j of prompt and generation that attended to token i, and over the g query heads of the KV
    head.

    When: by default, for continuing text. Among policies that only evict it has the lowest perplexity on WikiText-2 at
    every budget (SmolLM2, perplexity 12.6 with the full cache): 13.2 with half of the slots, 14.9 with a quarter, 18.0
    with a tenth.
    """

    def attention_stats(self, heads: Heads, new: LayerTokens) -> AttentionSum:
        """Request a_t, summed over queries and query heads."""
        return AttentionSum()
