"""Who leaves in heads whose slots lie on pages: the lowest rank of each head, found a block of pages at a time."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.types import New
from pallas_kernels.ranking import protected

NOBODY = jnp.iinfo(jnp.int32).max
"""The slot of who has none, beyond all others."""

Choice = tuple[Float[Array, " o"], Int[Array, " o"], Int[Array, " o"]]
"""Rank, position and slot of one token of each owner."""


class Contest(NamedTuple):
    """Whose slot may be had in each head."""

    rest: Choice
    """The lowest of those that do not compete: an empty slot, or a token that leaves last or never."""
    weakest: Choice
    """The lowest of those that compete."""
    surplus: Int[Array, " o"]
    """The weakest one has to leave if this is above 0, and others with it only if it is above 1."""


def owned(owner: Int[Array, " p"], valid: Bool[Array, " p"], owners: int) -> Bool[Array, "o p"]:
    """Which pages are whose."""
    return (owner == jnp.arange(owners)[:, None]) & valid


def victim(contest: Contest, new: New) -> Int[Array, "b h"]:
    """The slot, counted over the whole pool, that the next token takes in each head; beyond them for padding.

    Where the places of tokens that compete are limited, the weakest leaves when it has none; otherwise an empty slot is
    taken, or the oldest token kept as a last resort, or the weakest after all.
    """
    rest, weakest, surplus = contest
    competes = (surplus > 0) | ((rest[0] >= protected(rest[0].dtype)) & (weakest[2] < NOBODY))
    chosen = jnp.where(competes, weakest[2], rest[2]).reshape(new.k.shape[:2])
    return jnp.where(new.valid[:, :1], chosen, NOBODY)


def lowest(
    allowed: Bool[Array, "p s"], ranks: Array, position: Array, flat: Array, members: Bool[Array, "o p"]
) -> Choice:
    """Each owner's lowest rank, of equals the oldest."""
    low = jnp.where(allowed, ranks, jnp.inf)
    best = low.min(1)
    tied = allowed & (low == best[:, None])
    age = jnp.where(tied, position, NOBODY)
    oldest = age.min(1)
    slot = jnp.where(tied & (age == oldest[:, None]), flat, NOBODY).min(1)
    by_owner = jnp.where(members, best, jnp.inf)
    rank = by_owner.min(1)
    tied = members & (by_owner == rank[:, None])
    ages = jnp.where(tied, oldest, NOBODY)
    first = ages.min(1)
    return rank, first, jnp.where(tied & (ages == first[:, None]), slot, NOBODY).min(1)


def better(a: Choice, b: Choice) -> Choice:
    """Of each owner the lower one, or the older one of equals."""
    second = (b[0] < a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
    return tuple(jnp.where(second, y, x) for x, y in zip(a, b, strict=True))  # type: ignore[return-value]
