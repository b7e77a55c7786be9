"""FINCH (Corallo and Papotti 2024): tokens to which the question at the end of the prompt attends."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.methods.register import register_score
from kvjax.methods.snapkv import PromptWindow
from kvjax.policies import AttentionSum, Requirements
from kvjax.types import Heads, LayerTokens, Limit, View, derived, setting

QUESTION = 1e30
"""Score of the tokens of the question, above all others."""


@register_score("finch", paper="FINCH, 2024", group="ranked once for each prompt or turn")
class Question(PromptWindow):
    r"""Attention of the question after the token `delimiter`, or of the last `recent` tokens without one.

    .. math:: F(i) = \sum_{t > t_0} (t + 1) \, \bar a_t(i)

    with the attention averaged over the query heads of a KV head, times the number t + 1 of keys that a query attends
    to, and at position t_0 the last delimiter that is followed by other tokens of the prompt or turn. The question is
    evicted last. In a text without a delimiter, the last `recent` tokens are the question. Generated tokens score 0 and
    are evicted first, as under `snapkv`.

    The authors' code reads the context in chunks, each before the question and after what is left of earlier chunks. It
    adds up all heads of a layer, which keep the same tokens, and rotates their keys to successive positions. Here a
    prompt is read at once, each KV head keeps its own tokens, and keys are rotated again only with `positions='cache'`.
    The model reads the delimiter, which kvpress removes.

    When: if each prompt is a long context, a delimiter of your choice and a question. It has not been measured on many
    models yet.

    Args:
        delimiter: token id before the question; None for no delimiter.
    """

    kernel: int = derived(1)
    pooling: str = derived("average")
    group: str = derived("mean")
    delimiter: int | None = setting(None, Limit(lambda token: token >= 0, "a token id"))

    @property
    def requires(self) -> Requirements:
        return Requirements(whole_prompt=self.delimiter is not None)

    def _begin(self, heads: Heads, new: LayerTokens) -> Int[Array, "b h 1"]:
        newest = super()._begin(heads, new)
        if self.delimiter is None:
            return newest
        delimiters = new.valid & (new.token == self.delimiter) & (new.position < new.newest[:, None])
        last = jnp.where(delimiters, new.position, -1).max(1)[:, None, None]
        return jnp.where(last >= 0, last + 1, newest)

    def attention_stats(self, heads: Heads, new: LayerTokens) -> AttentionSum | None:
        request = super().attention_stats(heads, new)
        if request is None or request.weights is None:
            return request
        return request.replace(weights=request.weights * (new.position[:, None] + 1))

    def _pooled(self, sums: Float[Array, "b h c"], view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        question = view.position >= self._begin(view, new)
        return jnp.where(question, QUESTION, super()._pooled(sums, view, new))
