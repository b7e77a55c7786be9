"""SnapKV (Li et al. 2024, Listing 1): attention of the last queries, pooled over neighbors.

`snapkv` ranks a prompt once, by the queries at its end. `snapkv_decode` ranks at every eviction, by the newest queries.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.methods.last_queries import WindowAttention
from kvjax.methods.neighbors import in_text_order, pooled
from kvjax.methods.register import register_score
from kvjax.policies import AttentionSum, ReplayedQueries, Score, recent_slots
from kvjax.types import ODD, Heads, LayerTokens, PyTree, View, nothing, number, one_of, setting, wide


@register_score("snapkv", paper="SnapKV, Listing 1", group="ranked once for each prompt or turn")
class PromptWindow(Score):
    r"""Attention of the last `recent` prompt queries, pooled over neighbors.

    .. math:: F(i) = \mathrm{pool}_{|j - i| \le 3} \sum_{t = n - w}^{n - 1} \bar a_t(j)

    with the attention pooled over a KV head's query heads, too. Only prompts and turns are scored: generated tokens
    score 0 and are evicted first, the oldest before the others. With several chunks or turns, the attention of the
    windows at their ends is summed before it is pooled. A prompt read token by token is not pooled.

    When: for a long prompt with a short continuation. It ranks the prompt once. If half of the text is generated, it is
    worse than `streaming`: perplexity 18.3 against 17.4 at a quarter of the slots (SmolLM2 on WikiText-2).

    Args:
        recent: w, the last prompt queries, whose tokens are never evicted: tokens, or a fraction of a head's slots.
        kernel: number of neighbors that are pooled, odd.
        pooling: `average` or `max` over neighbors.
        group: `mean` or `max` over the query heads of a KV head.
    """

    recent: int | float = number(32)
    kernel: int = setting(7, ODD)
    pooling: str = setting("average", one_of("average", "max"))
    group: str = setting("mean", one_of("mean", "max"))

    def init_slot(self, new: LayerTokens, state: PyTree) -> tuple[Float[Array, "b h t"], Float[Array, "b h t"]]:
        """Return zeros: the attention of the window's queries, and the same pooled over neighbors."""
        return nothing(new), nothing(new)

    def _begin(self, heads: Heads, new: LayerTokens) -> Int[Array, "b h 1"]:
        # The position from which queries are in the window.
        width = jnp.broadcast_to(recent_slots(self.recent, heads.limit), heads.limit.shape)
        return (new.read[:, None] - width)[..., None]

    def attention_stats(self, heads: Heads, new: LayerTokens) -> AttentionSum | None:
        """Request the attention of the last w queries of a prompt or turn; nothing for a generated token."""
        if not new.given:
            return None
        in_window = new.valid[:, None] & (new.position[:, None] < new.prompt_length[:, None, None])
        in_window &= new.position[:, None] >= self._begin(heads, new)
        return AttentionSum(in_window.astype(wide(new.q.dtype)), group="max" if self.group == "max" else "sum")

    def update_slot(self, stats: Float[Array, "b h c"], view: View, new: LayerTokens) -> tuple[Array, Array]:
        """Sum the attention of the windows, and pool it at the end of a block."""
        added = stats if self.group == "max" else stats / new.q.shape[2]
        sums, scores = view.slots.score
        if new.token.shape[1] == 1:
            return sums + added, scores + added
        return sums + added, self._pooled(sums + added, view, new)

    def _pooled(self, sums: Float[Array, "b h c"], view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        # Scores of the tokens before the window, pooled over neighbours in position order.
        before = view.live & (view.position < self._begin(view, new))
        scores = jnp.where(before, sums, 0.0)
        scores = in_text_order(lambda x: pooled(x, self.kernel, self.pooling), scores, view.position)
        # Window tokens are not scored: one that leaves the window later counts as a generated token does.
        return jnp.where(before, scores, 0.0)

    def score(self, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        return view.slots.score[1]


@register_score(
    "snapkv_decode", paper="SnapKV, Listing 1, at every eviction", group="ranked by attention at every token"
)
class NewestWindow(WindowAttention):
    r"""Attention of the last `recent` queries, pooled over neighbors, at every eviction.

    .. math:: F(i) = \mathrm{pool}_{|j - i| \le 3} \frac 1 w \sum_{t = n - w}^{n - 1} \bar a_t(j)

    with the attention averaged over the query heads of a KV head and the last w queries of the text so far. Before each
    eviction, these queries attend again to the cached tokens of the head. Their own tokens stay.

    The code of R-KV and DecodingPress of kvpress also rank so while the model writes. From their first eviction on, the
    tokens that stay are in the order of their scores, and pools are over neighbors in that order; here neighbors are
    those in the text. Their window ends with the token being read, ours with the one before it. DecodingPress rotates
    the window's queries to one position, here each keeps its own.

    When: for long generated texts; `snapkv` ranks only prompts and turns. It has not been measured on many models yet.
    """

    def _looking(self, queries: ReplayedQueries, new: LayerTokens) -> ReplayedQueries:
        return queries.replace(weights=queries.weights / new.q.shape[2])

    def score(self, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        return self.with_window(new.spread.own_slots(self.attention(view, new)), view, new)
