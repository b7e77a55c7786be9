"""Selection of LSH-E's victim in XLA."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from pallas_kernels.ranking import Protection, victim


@dataclasses.dataclass(frozen=True, eq=False)
class HammingInputs:
    """Arguments of a selection; see `api.hamming`."""

    query: UInt32[Array, "b h g w"]
    codes: Sequence[UInt32[Array, "b h c"]]
    position: Int[Array, "b h c"]
    new_position: Int[Array, " b"]
    protection: Protection
    keep: Bool[Array, "b h c"] | None = None


def hamming(x: HammingInputs) -> Int[Array, "b h"]:
    """See `api.hamming`."""
    scores = -distances(x.query, x.codes).astype(jnp.float32)
    sinks, recent, limit = (bound[..., None] for bound in x.protection)
    return victim(scores, x.position, x.new_position[:, None, None], sinks, recent, limit, x.keep)[..., 0]


def distances(query: UInt32[Array, "b h g w"], codes: Sequence[UInt32[Array, "b h c"]]) -> Int[Array, "b h c"]:
    """Count the bits in which packed codes differ from those of a group's queries, summed over the group."""
    words = query.reshape(*query.shape[:2], -1)
    return distances_of_words([words[..., i : i + 1] for i in range(words.shape[-1])], codes)


def distances_of_words(
    query: Sequence[UInt32[Array, "*b 1"]], codes: Sequence[UInt32[Array, "*b c"]]
) -> Int[Array, "*b c"]:
    """Return `distances` from the words of all queries of a group, query by query, as kernels have them."""
    words = zip(query, itertools.cycle(codes), strict=False)
    return functools.reduce(operator.add, (jax.lax.population_count(a ^ b).astype(jnp.int32) for a, b in words))
