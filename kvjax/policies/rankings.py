"""Rankings that scores return: numbers, or a value whose type lets a kernel find the victim without numbers."""

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
    """Ranking by the distance between hash codes, summed over the query group: the farthest is evicted first.

    Args:
        hashing: hyperplanes, query and keys of the new tokens.
        codes: words of the slots' codes.
    """

    hashing: Hashing
    codes: tuple[UInt32[Array, "b h c"], ...]


Ranking = Array | OldestFirst | HammingDistance
"""Numbers are the importance of each slot [b h c]: the lowest is evicted first, -inf immediately, +inf never."""


def as_numbers(ranking: Ranking, view: View) -> Float[Array, "b h c"] | Any:
    """Return a ranking as numbers, the lowest of which is evicted first."""
    if isinstance(ranking, OldestFirst):
        return view.position.astype(jnp.float32)
    if isinstance(ranking, HammingDistance):
        return -distances(ranking.hashing.of_queries(), ranking.codes).astype(jnp.float32)
    return ranking


def standardized(x: Float[Array, "*b c"], counts: Bool[Array, "*b c"], spread: Spread) -> Float[Array, "*b c"]:
    """Return z-scores over the slots or tokens of each head that count, on all devices that share them."""
    some = jnp.maximum(spread.over_slots(counts.sum(-1, keepdims=True)), 1)

    def mean(x: Array) -> Array:
        return spread.over_slots(jnp.where(counts, x, 0.0).sum(-1, keepdims=True)) / some

    off = x - mean(x)
    return off / jnp.maximum(jnp.sqrt(mean(off**2)), 1e-6)


def coarse(scores: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Round to 15 significant bits in float32, for scores that a token's own key or value determines.

    A token that is read twice then scores the same twice, whatever rounding did to its keys and values.
    """
    return jax.lax.reduce_precision(scores.astype(jnp.float32), exponent_bits=8, mantissa_bits=14)
