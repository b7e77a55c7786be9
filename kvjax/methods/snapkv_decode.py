"""SnapKV while decoding: what the newest queries look at, pooled over neighbors, whenever tokens leave."""

from __future__ import annotations

from typing import Any

from flax import struct
from jaxtyping import Array, Float

from kvjax.methods.combine import combine
from kvjax.methods.last_queries import WindowAttention
from kvjax.methods.register import register
from kvjax.policies.policy import Policy
from kvjax.types import New, View


@struct.dataclass
class NewestWindow(WindowAttention):
    r"""Attention of the newest queries, pooled over neighbors.

    .. math:: F(i) = \mathrm{pool}_{|j - i| \le 3} \frac 1 w \sum_{t = n - w}^{n - 1} \bar a_t(j)

    with the mean attention of a KV head's query heads, of the last w queries of the prompt or of the text written so
    far. They attend again, to the tokens that the head holds before some of them leave.
    """

    paper = "SnapKV, Li et al. 2024, Listing 1, at every eviction"

    def score(self, view: View, new: New) -> Float[Array, "b h c"]:
        """Return F."""
        return new.spread.own_slots(self.attention(view, new))


@register(paper="SnapKV, Listing 1, at every eviction", group="ranked by attention at every token")
def snapkv_decode(
    *,
    recent: int = NewestWindow.window,
    kernel: int = NewestWindow.kernel,
    pooling: str = NewestWindow.pooling,
    evict_every: int = NewestWindow.every,
    **common: Any,
) -> Policy:
    """Attention of the last `recent` queries, pooled over neighbors, whenever tokens leave.

    When: where the model writes long texts: `snapkv` ranks only what it was given. It has not been measured on many
    models yet.

    Args:
        recent: newest tokens that never leave, whose queries rank the others.
    """
    score = NewestWindow(recent, evict_every, kernel, pooling)
    return combine(score, recent=recent, evict_every=evict_every, **common)
