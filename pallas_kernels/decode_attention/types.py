"""What decode attention takes besides slots, and what it gives back."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, UInt32


class LowRank(NamedTuple):
    """Evicted tokens' share of the attention in LESS (equation 3): one more split of mass phi z."""

    features: Float[Array, "b h g *t R"]
    """phi(q), not negative; of one token per row, without t, for `decode_attention`."""
    h: Float[Array, "b h R d"]
    """Sum of psi(k)^T v."""
    z: Float[Array, "b h R"]
    """Sum of psi(k)."""


class Gumbel(NamedTuple):
    """Noise and temperature of Keyformer's score increments (equation 9)."""

    seed: UInt32[Array, " b"]
    """The row's randomness, as in `kvjax.noise.uniform_at`."""
    tau: Float[Array, " b"]
    """The row's temperature, above 0."""
    layer: int = 0
    noise: str = "gumbel"
    """`gumbel`, `gaussian` of the same mean and deviation, or `none`."""


class Decoded(NamedTuple):
    """Attention of one token per row, a part that `kvjax.attention.merge` can merge further."""

    out: Float[Array, "b h g d"]
    """Over slots and low-rank share together; zeros where there is neither. At least float32."""
    lse: Float[Array, "b h g"]
    """Logarithm of the sum of exponentials, of the same."""
    scores: Array | None
    """Probabilities over the slots alone, [b h g c] for `each` and [b h c] for `sum` and `gumbel`; 0 where empty."""
