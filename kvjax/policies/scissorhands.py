"""Scissorhands: tokens that were important stay important, so the ones most often below average leave."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from kvjax.policies.base import Policy, check
from kvjax.types import setting

WORD = 32


@struct.dataclass(kw_only=True)
class Scissorhands(Policy):
    r"""Persistence of importance over a history window.

    .. math:: F_t(i) = -\sum_{j = t - w + 1}^{t} 1\left[\bar a_j(i) < 1 / n_j\right]

    with the mean attention over the query heads of the KV head, and n_j tokens that query j saw. One bit per slot and
    query of the window, in a ring indexed by the query's position.

    Args:
        history: queries that are remembered, a multiple of 32.
        recent: share of the budget for the most recent tokens.
    """

    needs_probs = True
    paper = "Scissorhands, Liu et al. 2023, Algorithm 2"

    history: int = setting(128)
    recent: int | float = setting(0.25)

    def __post_init__(self):
        super().__post_init__()
        whole = isinstance(self.history, int) and self.history > 0 and self.history % WORD == 0
        check(whole, "history", self.history, "a multiple of 32 queries, from 32")

    @property
    def last_queries(self):
        """Older queries of a prompt would be overwritten anyway."""
        return self.history

    def stats(self, new, state):
        """No query has looked yet: uint32 words [b h t w/32]."""
        return jnp.zeros((*new.k.shape[:3], self.history // WORD), jnp.uint32)

    def observe(self, cache, probs, new):
        """Set the bits of queries that attended below average; clear those of the queries they replace."""
        counts = new.valid & (new.position > new.newest[:, None] - self.history)
        if probs.shape[3] == 1:
            return self._remember(cache, probs, new.position, counts)
        stats = jax.lax.cond(
            counts.any(), lambda: self._remember(cache, probs, new.position, counts).stats, lambda: cache.stats
        )
        return cache.replace(stats=stats)

    def _remember(self, cache, probs, position, counts):
        place = jnp.where(counts, position % self.history, 0).astype(jnp.uint32)
        seen = (probs > 0).any(2)
        below = seen & (probs.mean(2) * seen.sum(-1, keepdims=True) < 1)
        if probs.shape[3] == 1:
            words = self._bits(place, counts, WORD)
            found = jnp.where(below[:, :, 0, :, None], words[:, None], jnp.uint32(0))
        else:
            # Every query has a bit of its own, so sums are unions; of 16 bits they are exact in the floats that a
            # matrix product is fast in.
            halves = self._bits(place, counts, WORD // 2)
            sums = jnp.einsum("bhtc,btw->bhcw", below.astype(jnp.float32), halves.astype(jnp.float32))
            low, high = jnp.moveaxis(sums.astype(jnp.uint32).reshape(*sums.shape[:-1], -1, 2), -1, 0)
            found, words = low | (high << (WORD // 2)), self._bits(place, counts, WORD)
        touched = jax.lax.reduce_or(words, axes=(1,))
        return cache.replace(stats=(cache.stats & ~touched[:, None, None]) | found)

    def _bits(self, place, counts, size: int):
        """The bit of each query among words of `size` bits [b t history/size]."""
        bit = jnp.where(counts, jnp.uint32(1) << (place % size), 0)
        return jnp.where(place[..., None] // size == jnp.arange(self.history // size), bit[..., None], 0)

    def score(self, cache, new):
        """Score = -(times below average)."""
        return -jax.lax.population_count(cache.stats).sum(-1).astype(jnp.float32)
