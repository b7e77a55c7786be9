"""Where owners' pages lie, and how a TPU's grid goes through them."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.common import SUBLANES, padded

SLOTS = (128, 512)
"""Slots of one grid step, about, at least and at most: of every head's last step some are read in vain."""

MOST_TOLD = 240_000
"""Numbers that fit in a TPU's scalar memory of a mebibyte."""


def ranges(owner: Int[Array, " P"], pages: Int[Array, "2"], owners: int) -> tuple[Int[Array, " o"], Int[Array, " o"]]:
    """Each owner's first page in a layer, and the one after its last."""
    page = jnp.arange(owner.shape[0])
    rising = jnp.where(page < pages[0], -1, jnp.where(page < pages[1], owner, owners))
    found = jnp.searchsorted(rising, jnp.arange(owners + 1)).astype(jnp.int32)
    return found[:-1], found[1:]


def tile(owners: int, layers: int, count: int, size: int) -> int:
    """Pages of one grid step, in a pool of `count` with `size` slots each: as many as an owner has on average.

    More where so many steps could not be told.
    """
    mean = count * size * 16 // 17 // (owners * layers)  # a pool is up to a sixteenth larger than what it holds
    slots, most = SLOTS
    while slots < most and (slots < mean or told(owners, owners, count, _pages(slots, count, size)) > MOST_TOLD):
        slots *= 2
    return _pages(slots, count, size)


def _pages(slots: int, count: int, size: int) -> int:
    return min(max(1, slots // padded(size, 2 * SUBLANES)), count)


def most_steps(owners: int, count: int, block: int) -> int:
    """Grid steps of so many pages that there can be: whoever owns no page takes one as well."""
    return owners + count // block


def told(rows: int, owners: int, count: int, block: int) -> int:
    """Numbers that a TPU's steps are told: whose each is, three for each owner and one for each row."""
    return most_steps(owners, count, block) + 3 * owners + rows
