"""What a step of LESS gives back."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float


class Remembered(NamedTuple):
    """The memory with what has left in it, and attention with the memory's share in it."""

    h: Float[Array, "b h R e"]
    """The sum of psi(k)^T v."""
    z: Float[Array, "b h R"]
    """The sum of psi(k)."""
    out: Float[Array, "b h g e"]
    """In the queries' dtype."""
