"""R-KV (Cai et al. 2025, arXiv 2505.24133): tokens that the last queries attend to, with keys unlike the others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.methods.last_queries import WindowAttention
from kvjax.methods.register import register_score
from kvjax.policies.stats import ReplayedQueries
from kvjax.types import LayerTokens, Limit, View, at_least, derived, number, setting, wide


@register_score("rkv", paper="R-KV", group="ranked by attention at every token")
class Redundancy(WindowAttention):
    r"""Tokens that the last queries attend to and whose keys are unlike the other keys.

    .. math:: F(i) = \lambda \max_{|j - i| \le 3} \bar a(j) - (1 - \lambda) \, \mathrm{softmax}_i
        \left( \frac 1 n \sum_{j \ne i, \; i \ne N(j)} \cos(k_i, k_j) \right)

    with the attention of the last w queries to the tokens before the window, averaged over these queries, and the n
    cached keys of the head. A KV head's query heads share one softmax, of the largest of their logits, and the window's
    own tokens are not in it, as in the authors' code. N(j) is the newest key whose cosine with key j is above the
    threshold, so the newest of similar keys is not redundant. The tokens of the window stay.

    In the authors' code, the tokens that stay are in the order of their scores from the first eviction on. Pools, and
    the newest of similar keys, follow that order there and the order of the text here.

    When: for long generated texts in which the model repeats itself. It has not been measured on many models yet.

    Args:
        importance: lambda; 0.1 in the paper, 0.07 in its code.
        threshold: cosine above which keys are similar.
    """

    recent: int = setting(8, at_least(1, "a number of queries"))
    pooling: str = derived("max")
    importance: float = number(0.1)
    threshold: float = setting(0.5, Limit(lambda cosine: -1 <= cosine <= 1, "a cosine"))

    def _looking(self, queries: ReplayedQueries, new: LayerTokens) -> ReplayedQueries:
        return queries.replace(newest=new.newest - self.recent, group="max")

    def score(self, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        keys = view.keys(new).astype(wide(new.k.dtype))
        length = jnp.linalg.norm(keys, axis=-1, keepdims=True)
        unit = jnp.where(view.live[..., None], keys / jnp.where(length > 0, length, 1.0), 0.0)
        unit, position = map(new.spread.all_slots, (unit, view.position))
        live = position >= 0
        likeness = self._sums(unit, position) / jnp.maximum(live.sum(-1, keepdims=True), 1)
        redundancy = jax.nn.softmax(jnp.where(live, likeness, -jnp.inf), axis=-1, where=live)
        scores = self.importance * self.attention(view, new) - (1 - self.importance) * redundancy
        return self.with_window(new.spread.own_slots(scores), view, new)

    def _sums(self, unit: Float[Array, "b h c d"], position: Int[Array, "b h c"]) -> Float[Array, "b h c"]:
        # Cosines of each key to the others, added up for a block of these at a time: half the memory of the keys.
        size = min(max(1, unit.shape[-1] // 2), position.shape[-1])
        blocks = -(-position.shape[-1] // size)
        more = blocks * size - position.shape[-1]
        rows = jnp.pad(unit, ((0, 0), (0, 0), (0, more), (0, 0)))
        places = jnp.pad(position, ((0, 0), (0, 0), (0, more)), constant_values=-1)

        def add(index: Array, sums: Array) -> Array:
            keys = jax.lax.dynamic_slice_in_dim(rows, index * size, size, 2)
            block_position = jax.lax.dynamic_slice_in_dim(places, index * size, size, 2)[..., None]
            cosine = jnp.einsum("bhnd,bhcd->bhnc", keys, unit)
            at = position[:, :, None]
            similar = (cosine > self.threshold) & (at >= 0) & (block_position >= 0) & (at != block_position)
            newest = jnp.where(similar, at, -1).max(-1, keepdims=True)
            return sums + jnp.where((at != block_position) & ~(similar & (at == newest)), cosine, 0.0).sum(2)

        return jax.lax.fori_loop(0, blocks, add, jnp.zeros(position.shape, unit.dtype))
