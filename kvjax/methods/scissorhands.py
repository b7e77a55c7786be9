"""Scissorhands (Liu et al. 2023, Algorithm 2): tokens that are most often below average are evicted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32

from kvjax.methods.register import register_score
from kvjax.policies import AttentionProbs, Score, Seen
from kvjax.types import Heads, LayerTokens, Limit, PyTree, View, setting

WORD = 32
_HISTORY = Limit(lambda queries: queries in range(WORD, 2**16 + 1, WORD), "a multiple of 32 queries from 32 to 65536")


@register_score(
    "scissorhands", paper="Scissorhands, Algorithm 2", group="ranked by attention at every token", recent=0.25
)
class Persistence(Score):
    r"""Tokens whose attention was least often below average over a history window.

    .. math:: F_t(i) = -\sum_{j = t - w + 1}^{t} 1\left[\bar a_j(i) < 1 / n_j\right]

    with the attention averaged over the query heads of the KV head, and n_j tokens to which query j attended. A slot
    stores one bit for each query of the window, in a ring indexed by the query's position.

    When: as an alternative to `h2o` with half of the slots (perplexity 13.3 against 13.2, SmolLM2 on WikiText-2). With
    a quarter it is between `h2o` and `streaming`.

    Args:
        history: w, number of queries in the window, a multiple of 32 up to 65536; a slot stores one bit for each.
    """

    history: int = setting(128, _HISTORY)

    def init_slot(self, new: LayerTokens, state: PyTree) -> UInt32[Array, "b h t words"]:
        return jnp.zeros((*new.k.shape[:3], self.history // WORD), jnp.uint32)

    def attention_stats(self, heads: Heads, new: LayerTokens) -> AttentionProbs:
        """Request the attention of the window's queries; the ring has no bits for older ones."""
        return AttentionProbs(self.history)

    def update_slot(self, stats: Seen, view: View, new: LayerTokens) -> UInt32[Array, "b h c words"]:
        """Set the bits of queries that attended below average; clear those of the queries they replace."""
        probs, position, visible, mask = stats
        counts = position >= 0
        place = jnp.where(counts, position % self.history, 0).astype(jnp.uint32)
        # An average share is none below, however a softmax rounds it: the first query's is 1, or just less.
        average = 1 - 16 * jnp.finfo(probs.dtype).eps
        below = mask & (probs.mean(2) * visible[..., None] < average)
        words = self._bits(place, counts, WORD)
        if probs.shape[3] == 1:
            bits = jnp.where(below[:, :, 0, :, None], words[:, None], jnp.uint32(0))
        else:
            # Every query has a bit of its own, so sums are unions; of 16 bits they are exact in the floats that a
            # matrix product is fast in.
            halves = self._bits(place, counts, WORD // 2)
            sums = jnp.einsum("bhtc,btw->bhcw", below.astype(jnp.float32), halves.astype(jnp.float32))
            low, high = jnp.moveaxis(sums.astype(jnp.uint32).reshape(*sums.shape[:-1], -1, 2), -1, 0)
            bits = low | (high << (WORD // 2))
        touched = jax.lax.reduce_or(words, axes=(1,))
        return (view.slots.score & ~touched[:, None, None]) | bits

    def _bits(self, place: UInt32[Array, "b t"], counts: Bool[Array, "b t"], size: int) -> UInt32[Array, "b t words"]:
        """Return the bit of each query among words of `size` bits."""
        bit = jnp.where(counts, jnp.uint32(1) << (place % size), 0)
        return jnp.where(place[..., None] // size == jnp.arange(self.history // size), bit[..., None], 0)

    def score(self, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        return -jax.lax.population_count(view.slots.score).sum(-1).astype(jnp.float32)
