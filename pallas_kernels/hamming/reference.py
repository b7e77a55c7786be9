"""Selection of LSH-E's victim in XLA."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from pallas_kernels.hamming.api import HammingVictim
from pallas_kernels.op import Options
from pallas_kernels.ranking import victim


def hamming(x: HammingVictim, _: Options) -> Int[Array, "b h"]:
    scores = -distances(x.query, x.codes).astype(jnp.float32)
    sinks, recent, limit = (rule[..., None] for rule in x.protection)
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
