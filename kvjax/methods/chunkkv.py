"""ChunkKV (arXiv 2502.00299): prompt tokens are kept or evicted in chunks, by the scores of any other policy."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.methods.register import register
from kvjax.methods.registry import base_policy, name_of
from kvjax.policies import UNRANKED, Policy, ScoreOver, as_numbers, is_ranked
from kvjax.types import Heads, LayerTokens, PyTree, View, at_least, nothing, setting


class ChunkSum(ScoreOver):
    r"""Sum of another score s over the cached tokens of a chunk.

    .. math:: F(i) = \sum_{j: \lfloor j / L \rfloor = \lfloor i / L \rfloor} s(j)

    It is computed at the end of each prompt, chunk or turn. Tokens that s does not rank, such as its sinks, add
    nothing, and a chunk with tokens that s always keeps is kept. Generated tokens are evicted first, the oldest before
    the others. If the budget is not a multiple of L, the newest tokens of one chunk are kept.

    Args:
        length: L, number of tokens in a chunk.
    """

    length: int = setting(20, at_least(1, "a number of tokens"))

    def init_slot(self, new: LayerTokens, state: PyTree) -> tuple[PyTree, Float[Array, "b h t"]]:
        """Return what the other score stores, and the lowest sum."""
        return self.base_score.init_slot(new, state), jnp.full_like(nothing(new), UNRANKED)

    def attention_stats(self, heads: Heads, new: LayerTokens) -> PyTree:
        """Return the requests of the other score; prompts and turns are always ranked."""
        requests = self.base_score.attention_stats(heads, new)
        return () if requests is None and new.given else requests

    def update_slot(self, stats: PyTree, view: View, new: LayerTokens) -> tuple[PyTree, Float[Array, "b h c"]]:
        """Update the other score, and sum it at the end of a prompt or turn."""
        base, summed = view.slots.score
        inner = view.replace(slots=view.slots.replace(score=base))
        if self.base_score.attention_stats(view, new) is not None:
            base = self.base_score.update_slot(stats, inner, new)
            inner = view.replace(slots=view.slots.replace(score=base))
        if not new.given or new.token.shape[1] == 1:
            return base, summed
        scores = as_numbers(self.base_score.score(inner, new), inner).astype(summed.dtype)
        # Tokens that are not ranked add nothing, and those that are to stay take their chunk with them.
        added = jnp.where(is_ranked(scores), scores, jnp.where(scores > 0, -UNRANKED, 0.0))
        return base, self._summed(jnp.where(view.live, added, 0.0), view)

    def _summed(self, scores: Float[Array, "b h c"], view: View) -> Float[Array, "b h c"]:
        # Slots in the order of the text have the chunks one after another.
        chunk = jnp.where(view.live, view.position // self.length, jnp.iinfo(jnp.int32).max)
        order = jnp.argsort(chunk, axis=-1)
        chunk, scores = (jnp.take_along_axis(x, order, axis=-1) for x in (chunk, scores))
        number = jnp.cumsum(jnp.diff(chunk, axis=-1, prepend=chunk[..., :1]) != 0, axis=-1)
        of_heads = jax.vmap(jax.vmap(lambda x, number: jax.ops.segment_sum(x, number, view.capacity)[number]))
        return jnp.take_along_axis(of_heads(scores, number), jnp.argsort(order, axis=-1), axis=-1)

    def score(self, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        return view.slots.score[1]


@register(paper="ChunkKV, 2025", group="over another policy")
def chunkkv(*, base: str | Policy = "snapkv", length: int = ChunkSum.length, **settings: Any) -> Policy:
    """Any policy, with prompt tokens kept or evicted in chunks of `length`; further settings are the base's.

    When: if tokens have a meaning only together with their neighbors. It has not been measured on many models yet.

    Args:
        base: the policy that scores: a name or a `Policy`.
    """
    chosen = base_policy(base, settings)
    return dataclasses.replace(chosen, score=ChunkSum(chosen.score, name_of(chosen), length), name="chunkkv")
