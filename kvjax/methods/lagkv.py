"""LagKV (arXiv 2504.04704): keys and values that vary most, relative to the next chunk of text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.methods.neighbors import text_order
from kvjax.methods.register import register_score
from kvjax.policies.score import PromptScore
from kvjax.types import LayerTokens, View, at_least, setting, wide


@register_score("lagkv", paper="LagKV, 2025", group="ranked once for each prompt or turn", recent=32)
class LagRelative(PromptScore):
    r"""Rank of a token within its chunk, by the standard deviation of its channels, scaled by the next chunk's range.

    .. math::
        s(x)_i = \mathrm{softmax}_{i \in p} \, \mathrm{std}_c
            \frac{x_{ic} - \min_{j \in p + 1} x_{jc}}{\max_{j \in p + 1} x_{jc} - \min_{j \in p + 1} x_{jc}}, \quad
        F(i) = \frac 1 L \, \mathrm{rank}_{i \in p} \frac{s(k)_i + s(v)_i}{2}

    Chunks p consist of L cached tokens of the head, in the order of the text and after the first `sinks`. Tokens of the
    last whole chunk and later ones score 1, as do the sinks and all tokens of a text with fewer than two chunks. A
    budget of no more slots than tokens that score 1 keeps the newest of these: 256 of 512 tokens with the defaults.

    The authors' code has 16 sinks. It compresses a chunk once the next one is complete, in prompts and while the model
    writes, and never evicts the newest L tokens. Here, as in kvpress, a prompt is ranked once. Generated tokens are
    evicted first, except the newest `recent` ones; kvpress evicts none.

    When: if attention probabilities are not available and prompts have thousands of tokens, or with a smaller `lag`. It
    has not been measured on many models yet.

    Args:
        sinks: number of first cached tokens, which belong to no chunk.
        lag: L, number of tokens in a chunk.
    """

    sinks: int = setting(4)
    lag: int = setting(128, at_least(2, "a number of tokens"))

    def _ranked(self, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        kind, capacity = wide(new.k.dtype), view.capacity
        order = text_order(view.position)
        chunks = max(capacity - self.sinks, 0) // self.lag
        if chunks < 2:
            return jnp.ones(view.position.shape, kind)
        in_chunks = order[..., self.sinks : self.sinks + chunks * self.lag]

        def measured(x: Float[Array, "b h c d"]) -> Float[Array, "b h p l"]:
            x = jnp.take_along_axis(x.astype(kind), in_chunks[..., None], axis=2)
            x = x.reshape(*x.shape[:2], chunks, self.lag, -1)
            low, high = x.min(3, keepdims=True)[:, :, 1:], x.max(3, keepdims=True)[:, :, 1:]
            units = (x[:, :, :-1] - low) / jnp.where(high > low, high - low, 1.0)
            return jax.nn.softmax(units.std(-1, ddof=1), axis=-1)

        scores = (measured(view.keys(new)) + measured(view.values(new))) / 2
        ranks = jnp.argsort(jnp.argsort(scores, axis=-1), axis=-1) / self.lag
        count = (view.live.sum(-1) - self.sinks) // self.lag
        followed = jnp.arange(chunks - 1) < count[..., None] - 1
        ranks = jnp.where(followed[..., None], ranks, 1.0).reshape(*view.position.shape[:2], -1)
        after = capacity - self.sinks - ranks.shape[-1]
        ranks = jnp.pad(ranks, ((0, 0), (0, 0), (self.sinks, after)), constant_values=1.0)
        return jnp.take_along_axis(ranks, jnp.argsort(order, axis=-1), axis=-1)
