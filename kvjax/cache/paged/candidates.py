"""Eviction candidates on pages: the lowest-ranked slot of each head, found one block of pages at a time."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.types import New
from pallas_kernels.ranking import protected

NO_SLOT = jnp.iinfo(jnp.int32).max
"""Slot number that means no slot; larger than all others."""

Choice = tuple[Float[Array, " o"], Int[Array, " o"], Int[Array, " o"]]
"""Rank, position and slot of one token per owner."""


class Candidates(NamedTuple):
    """Eviction candidates of each head."""

    rest: Choice
    """Lowest-ranked slot outside the competition: empty, or with a token that is evicted last or never."""
    weakest: Choice
    """Lowest-ranked slot that competes."""
    surplus: Int[Array, " o"]
    """Number of tokens over the quota: the lowest-ranked one is evicted if it is above 0, and more if above 1."""


def owned(owner: Int[Array, " p"], valid: Bool[Array, " p"], owners: int) -> Bool[Array, "o p"]:
    """Return a mask of the pages of each owner."""
    return (owner == jnp.arange(owners)[:, None]) & valid


def victim(candidates: Candidates, new: New) -> Int[Array, "b h"]:
    """Return the slot that the next token takes in each head, numbered over the whole pool; `NO_SLOT` for padding.

    If a quota bounds the competing tokens, the lowest-ranked one is evicted when they exceed it. Otherwise the new
    token takes an empty slot, else that of the oldest token that is evicted last, else that of the lowest-ranked token.
    """
    rest, weakest, surplus = candidates
    competes = (surplus > 0) | ((rest[0] >= protected(rest[0].dtype)) & (weakest[2] < NO_SLOT))
    chosen = jnp.where(competes, weakest[2], rest[2]).reshape(new.k.shape[:2])
    return jnp.where(new.valid[:, :1], chosen, NO_SLOT)


def lowest(
    allowed: Bool[Array, "p s"], ranks: Array, position: Array, flat: Array, members: Bool[Array, "o p"]
) -> Choice:
    """Return each owner's lowest-ranked token, the oldest among equal ranks."""
    low = jnp.where(allowed, ranks, jnp.inf)
    best = low.min(1)
    tied = allowed & (low == best[:, None])
    age = jnp.where(tied, position, NO_SLOT)
    oldest = age.min(1)
    slot = jnp.where(tied & (age == oldest[:, None]), flat, NO_SLOT).min(1)
    by_owner = jnp.where(members, best, jnp.inf)
    rank = by_owner.min(1)
    tied = members & (by_owner == rank[:, None])
    ages = jnp.where(tied, oldest, NO_SLOT)
    first = ages.min(1)
    return rank, first, jnp.where(tied & (ages == first[:, None]), slot, NO_SLOT).min(1)


def better(a: Choice, b: Choice) -> Choice:
    """Return the lower-ranked of two tokens per owner, the older one if their ranks are equal."""
    second = (b[0] < a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
    return tuple(jnp.where(second, y, x) for x, y in zip(a, b, strict=True))  # type: ignore[return-value]
