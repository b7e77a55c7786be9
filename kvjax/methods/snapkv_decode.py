"""SnapKV (Li et al. 2024, Listing 1) during decoding: attention of the newest queries, at every eviction."""

from __future__ import annotations

from typing import Any

from flax import struct
from jaxtyping import Array, Float

from kvjax.methods.combine import combine
from kvjax.methods.last_queries import WindowAttention
from kvjax.methods.register import register
from kvjax.policies.policy import Policy
from kvjax.policies.stats import Again
from kvjax.types import New, View


@struct.dataclass
class NewestWindow(WindowAttention):
    r"""Attention of the newest queries, pooled over neighbors.

    .. math:: F(i) = \mathrm{pool}_{|j - i| \le 3} \frac 1 w \sum_{t = n - w}^{n - 1} \bar a_t(j)

    with the attention averaged over the query heads of a KV head and the last w queries of the text so far. Before each
    eviction, these queries attend again to the cached tokens of the head. Their own tokens stay.
    """

    def _looking(self, queries: Again, new: New) -> Again:
        return queries.replace(weights=queries.weights / new.q.shape[2])

    def score(self, view: View, new: New) -> Float[Array, "b h c"]:
        return self.with_window(new.spread.own_slots(self.attention(view, new)), view, new)


@register(paper="SnapKV, Listing 1, at every eviction", group="ranked by attention at every token")
def snapkv_decode(
    *,
    recent: int = NewestWindow.window,
    kernel: int = NewestWindow.kernel,
    pooling: str = NewestWindow.pooling,
    evict_every: int = NewestWindow.every,
    **common: Any,
) -> Policy:
    """Attention of the last `recent` queries, pooled over neighbors, at every eviction.

    When: for long generated texts; `snapkv` ranks only prompts and turns. It has not been measured on many models yet.

    Args:
        recent: newest tokens, which are never evicted and whose queries rank the others.
    """
    score = NewestWindow(recent, evict_every, kernel, pooling)
    return combine(score, recent=recent, evict_every=evict_every, **common)
