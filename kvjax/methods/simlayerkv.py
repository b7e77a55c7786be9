"""SimLayerKV: layers that attend mostly to the first and newest tokens keep only these."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.methods.ends import EndsOrAll, ends_policy
from kvjax.methods.register import register_score
from kvjax.policies.stats import AttentionSum
from kvjax.types import Heads, LayerTokens, PyTree, View, number, share, wide


@register_score("simlayerkv", paper="SimLayerKV, 2024", group="ranked once for each prompt or turn", make=ends_policy)
class LazyLayers(EndsOrAll):
    r"""Keep the first `sinks` and the newest `recent` tokens in lazy layers, and everything in the others.

    In lazy layers the prompt's last query gives the first and newest tokens more attention than t.

    .. math:: C = \begin{cases} s + w & \text{if}\ \bar a_n(\{i < s\} \cup \{i > n - w\}) > t \\ N & \text{else}
        \end{cases}

    with the attention averaged over all query heads of the layer, the s first and w newest tokens, and N = prompt +
    `max_new_tokens`, beyond which logits are NaN. Each row has its own lazy layers, and none if its prompt has at most
    s + w tokens. Special tokens of the prompt get additional slots, generated ones do not.

    When: with prompts much longer than `recent`, and budgets close to the full cache. It has not been measured on many
    models yet.

    Args:
        threshold: t, in [0, 1]; 1 for no lazy layer. The authors use 0.9 for Llama 3, 0.65 for Llama 2, 0.8 for Mistral
            and 0.85 for Qwen.
        sinks: s, first tokens that lazy layers keep.
        recent: w, newest tokens that lazy layers keep, the one being read included.
    """

    threshold: float = number(0.9, share("a share of attention"))

    def attention_stats(self, heads: Heads, new: LayerTokens) -> AttentionSum:
        """Request the attention of the last query, a mean over the layer's heads."""
        last = new.position == new.newest[:, None]
        return AttentionSum(last[:, None].astype(wide(new.q.dtype)), over="layer")

    def head_budgets(
        self, stats: Float[Array, "b h c"], view: View, ranks: Float[Array, "b h c"] | None, new: LayerTokens
    ) -> tuple[Int[Array, "b h"], PyTree]:
        ends = (view.position < self.sinks) | (view.position > new.newest[:, None, None] - self.recent)
        mass = jnp.where(view.live & ends, stats, 0.0).sum(-1) / new.q.shape[2]
        longer = new.read > self.sinks + self.recent
        lazy = (mass > self.threshold) & (self.threshold < 1) & longer[:, None]
        return self.slots_of(lazy, view, new), view.state.plan
