"""Result of a decode step with LESS's memory."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float


class Remembered(NamedTuple):
    """Memory that includes the evicted pairs, and attention that includes the memory."""

    h: Float[Array, "b h R e"]
    """Sum of psi(k)^T v."""
    z: Float[Array, "b h R"]
    """Sum of psi(k)."""
    out: Float[Array, "b h g e"]
    """Attention in the queries' dtype."""
