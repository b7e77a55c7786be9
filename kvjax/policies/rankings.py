"""Rankings that scores return: an array, or a value from which a kernel finds the victim without computing scores."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, UInt32

from kvjax.types import Spread, View
from pallas_kernels.hamming import Hashing, distances


@struct.dataclass
class OldestFirst:
    """Ranking by age: the oldest token is evicted first, and the newest tokens stay without a gap."""


@struct.dataclass
class HammingDistance:
    """Ranking by Hamming distance of hash codes, summed over the query group: the farthest token is evicted first.

    Args:
        hashing: hyperplanes, query and keys of the new tokens.
        codes: words of the slots' codes.
    """

    hashing: Hashing
    codes: tuple[UInt32[Array, "b h c"], ...]


@struct.dataclass
class SplitRanking:
    """Ranking of slots within each head, and another one by which heads compete for slots under a plan as `adakv`.

    Args:
        within: importance of each slot in its head, which decides what is evicted.
        between: importance of each slot among the slots of all heads.
    """

    within: Float[Array, "b h c"]
    between: Float[Array, "b h c"]


Ranking = Array | OldestFirst | HammingDistance | SplitRanking
"""Numbers are the importance of each slot [b h c]: the lowest is evicted first, -inf immediately, +inf never."""


def as_numbers(ranking: Ranking, view: View) -> Float[Array, "b h c"] | Any:
    """Return a ranking as an array of scores, the lowest of which is evicted first."""
    if isinstance(ranking, SplitRanking):
        return ranking.within
    if isinstance(ranking, OldestFirst):
        return view.position.astype(jnp.float32)
    if isinstance(ranking, HammingDistance):
        return -distances(ranking.hashing.of_queries(), ranking.codes).astype(jnp.float32)
    return ranking


def between_heads(ranking: Ranking, view: View) -> Float[Array, "b h c"] | Any:
    """Return a ranking as an array of scores that are compared between heads."""
    return ranking.between if isinstance(ranking, SplitRanking) else as_numbers(ranking, view)


def standardized(x: Float[Array, "*b c"], counts: Bool[Array, "*#b c"], spread: Spread) -> Float[Array, "*b c"]:
    """Return z-scores over those slots or tokens of each head that count, on all devices that shard them."""
    count = jnp.maximum(spread.over_slots(counts.sum(-1, keepdims=True)), 1)

    def mean(x: Array) -> Array:
        return spread.over_slots(jnp.where(counts, x, 0.0).sum(-1, keepdims=True)) / count

    off = x - mean(x)
    return off / jnp.maximum(jnp.sqrt(mean(off**2)), 1e-6)


def coarse(scores: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Round to 15 significant bits in float32, for scores that a token's own key or value determines.

    Equal tokens then get equal scores in spite of rounding errors in their keys and values.
    """
    return jax.lax.reduce_precision(scores.astype(jnp.float32), exponent_bits=8, mantissa_bits=14)
