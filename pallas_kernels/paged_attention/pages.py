"""Ranges of owners' pages, and the steps of a TPU's grid over them."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.common import SUBLANES, padded

SLOTS = (128, 512)
"""Approximate minimum and maximum slots of one grid step; each head's last step reads some that it does not use."""

MOST_TOLD = 240_000
"""Maximum scalars of the steps, which must fit in a TPU's scalar memory of one mebibyte."""


def ranges(owner: Int[Array, " P"], pages: Int[Array, "2"], owners: int) -> tuple[Int[Array, " o"], Int[Array, " o"]]:
    """Return each owner's first page in a layer, and the one after its last."""
    page = jnp.arange(owner.shape[0])
    rising = jnp.where(page < pages[0], -1, jnp.where(page < pages[1], owner, owners))
    found = jnp.searchsorted(rising, jnp.arange(owners + 1)).astype(jnp.int32)
    return found[:-1], found[1:]


def tile(owners: int, layers: int, count: int, size: int) -> int:
    """Return the pages of one grid step, about as many as an owner has on average.

    The pool has `count` pages of `size` slots. Steps take more pages if their scalars would exceed `MOST_TOLD`.
    """
    mean = count * size * 16 // 17 // (owners * layers)  # a pool is up to a sixteenth larger than its contents
    slots, most = SLOTS
    while slots < most and (slots < mean or told(owners, owners, count, _pages(slots, count, size)) > MOST_TOLD):
        slots *= 2
    return _pages(slots, count, size)


def _pages(slots: int, count: int, size: int) -> int:
    return min(max(1, slots // padded(size, 2 * SUBLANES)), count)


def most_steps(owners: int, count: int, block: int) -> int:
    """Return the maximum number of grid steps of `block` pages; an owner without pages takes a step as well."""
    return owners + count // block


def told(rows: int, owners: int, count: int, block: int) -> int:
    """Return the number of scalars of a TPU's steps: each step's owner, three per owner and one per row."""
    return most_steps(owners, count, block) + 3 * owners + rows
