"""Mean queries of a model over some texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.inference.extend import prefill
from kvjax.methods.triattention import QueryMeans, pair_norms, require_ropes
from kvjax.model import Model
from kvjax.policies import AgeScore, Policy
from kvjax.types import Heads, LayerTokens, wide

Sums = tuple[Float[Array, "b h g d"], Float[Array, "b h g f"]]


class QuerySums(AgeScore):
    """Ranking by age, during which each head sums its queries before rotation, and the norms of their pairs."""

    def init_head(self, shape: LayerTokens) -> Sums:
        query = jnp.zeros((*shape.q.shape[:3], shape.q.shape[-1]), wide(shape.q.dtype))
        return query, pair_norms(shape.config.rope, query)

    def update_head(self, heads: Heads, new: LayerTokens) -> Sums:
        query, norm = heads.state.score
        raw = jnp.where(new.valid[:, None, None, :, None], new.raw_q.astype(query.dtype), 0.0)
        return query + raw.sum(3), norm + pair_norms(new.config.rope, raw).sum(3)


def query_means(
    model: Model, texts: Iterable[Int[np.ndarray, " _"]], show: Callable[[int], None] = lambda tokens: None
) -> tuple[QueryMeans, int]:
    """Return the mean queries of each layer, and the number of tokens over which they were averaged.

    Args:
        texts: token ids of prompts; those of equal length share their compiled programs.
    """
    require_ropes(model)
    policy = Policy(QuerySums())
    totals: Any = None
    tokens = 0
    for text in texts:
        state, _ = prefill(model, policy, [text.tolist()], budget=1)
        sums = [[np.asarray(leaf[0], np.float64) for leaf in heads.state.score] for heads in state.cache.attending]
        totals = sums if totals is None else jax.tree.map(np.add, totals, sums)
        tokens += len(text)
        show(tokens)
    center, norm = (tuple(jnp.asarray(layer[i] / tokens) for layer in totals) for i in range(2))
    return QueryMeans(center, norm), tokens
