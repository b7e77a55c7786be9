"""The newest queries of a layer, stored to attend again before an eviction."""

from __future__ import annotations

import abc

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.methods.neighbors import in_text_order, pooled
from kvjax.policies import ReplayedQueries, Requirements, Score
from kvjax.types import ODD, Heads, LayerTokens, PyTree, View, at_least, nothing, one_of, setting, wide


def no_queries(shape: LayerTokens, count: int) -> Float[Array, "b h a g d"]:
    """Return empty storage for `count` queries before rotation; the query of token i gets index i modulo the window."""
    rows, heads, groups, _, width = shape.q.shape
    return jnp.zeros((rows, heads, count, groups, width), shape.q.dtype)


def with_newest_queries(
    queries: Float[Array, "b h a g d"], new: LayerTokens, window: Int[Array, "b #h"]
) -> Float[Array, "b h a g d"]:
    """Return stored queries with the oldest ones replaced by new ones."""
    rows, number, room = queries.shape[:3]
    # Of a block that is longer than the window only its end: no two queries have the same place.
    last = new.valid & (new.position > new.newest[:, None] - window)
    place = jnp.where(last, new.position % window, room + jnp.arange(last.shape[1]))[:, None]
    row, head = jnp.arange(rows)[:, None, None], jnp.arange(number)[:, None]
    return queries.at[row, head, place].set(jnp.moveaxis(new.raw_q, 3, 2), mode="drop", unique_indices=True)


def positions_of_queries(count: int, new: LayerTokens, window: Int[Array, "b #h"]) -> Int[Array, "b a"]:
    """Return the position of each of `count` stored queries; -1 for none."""
    place, newest = jnp.arange(count), new.newest[:, None]
    position = newest - (newest - place) % window
    return jnp.where((place < window) & (position >= 0), position, -1)


class WindowAttention(Score, interface=True):
    """Score by the mean attention of the last queries, which attend again before each eviction.

    Args:
        recent: newest tokens, which are never evicted and whose queries rank the others.
        evict_every: number of tokens from one eviction to the next; in between a head grows beyond its budget.
        kernel: number of neighbors that are pooled, odd.
        pooling: `average` or `max` over neighbors.
    """

    recent: int = setting(32, at_least(1, "a number of queries"))
    evict_every: int = setting(128, at_least(1, "a number of tokens"))
    kernel: int = setting(7, ODD)
    pooling: str = setting("average", one_of("average", "max"))

    @property
    def requires(self) -> Requirements:
        """All tokens of a head; queries of idle rows do not change."""
        return Requirements(whole_heads=True, keeps_idle_rows=True)

    def init_head(self, shape: LayerTokens) -> PyTree:
        return no_queries(shape, self.recent)

    def init_slot(self, new: LayerTokens, state: PyTree) -> Float[Array, "b h t"]:
        return nothing(new)

    def attention_stats(self, heads: Heads, new: LayerTokens) -> ReplayedQueries:
        """Request the mean attention of the queries if the next token will find no empty slot."""
        queries = self.update_head(heads, new)
        position = positions_of_queries(self.recent, new, self._window(new))
        share = 1 / jnp.clip(new.read, 1, self.recent)
        counts = (position >= 0) & self._due(new)[:, None]
        weights = jnp.where(counts, share[:, None], 0.0).astype(wide(new.q.dtype))
        return self._looking(
            ReplayedQueries(queries, position, jnp.broadcast_to(weights[:, None], queries.shape[:3])), new
        )

    @abc.abstractmethod
    def _looking(self, queries: ReplayedQueries, new: LayerTokens) -> ReplayedQueries:
        """Return the queries, whose weights add up to 1, with the attention that counts."""

    def update_head(self, heads: Heads, new: LayerTokens) -> PyTree:
        return with_newest_queries(heads.state.score, new, self._window(new))

    def update_slot(self, stats: Float[Array, "b h c"], view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        """Return the requested attention, or the old state if none was requested."""
        return jnp.where(self._due(new)[:, None, None], stats, view.slots.score)

    def attention(self, view: View, new: LayerTokens) -> Float[Array, "b h all"]:
        """Return the attention to all slots, pooled over neighbors for the tokens before the window."""
        position, scores = map(new.spread.all_slots, (view.position, view.slots.score))
        before = (position >= 0) & (position <= self._before(new))
        pool = in_text_order(lambda x: pooled(x, self.kernel, self.pooling), jnp.where(before, scores, 0.0), position)
        return jnp.where(before, pool, 0.0)

    def with_window(self, scores: Float[Array, "b h c"], view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        """Return the scores, infinite for tokens of the window.

        The recent tokens that are protected include the next one, and so not the oldest one of the window.
        """
        return jnp.where(view.position > jnp.maximum(self._before(new), -1), jnp.inf, scores)

    def _before(self, new: LayerTokens) -> Int[Array, "b 1 1"]:
        # The newest position before the window; a decoded token has no slot yet.
        return (new.newest - (not new.given) - self.recent)[:, None, None]

    def _window(self, new: LayerTokens) -> Int[Array, "b 1"]:
        return jnp.full((len(new.read), 1), self.recent, jnp.int32)

    def _due(self, new: LayerTokens) -> Array:
        return (new.read % self.evict_every == 0) | jnp.asarray(new.given)
