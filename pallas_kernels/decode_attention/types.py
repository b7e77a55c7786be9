"""What decode attention takes besides slots, and what it gives back."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.attention import LowRank as LowRank

Places = tuple[Int[Array, "b h"], Int[Array, "b h c"]]
"""Where the model sees the query and the keys, if not at their positions."""


class Gumbel(NamedTuple):
    """Noise and temperature of Keyformer's score increments (equation 9)."""

    seed: UInt32[Array, " b"]
    """The row's randomness, as in `pallas_kernels.noise.uniform_at`."""
    tau: Float[Array, " b"]
    """The row's temperature, above 0."""
    layer: int = 0
    noise: str = "gumbel"
    """`gumbel`, `gaussian` of the same mean and deviation, or `none`."""
    first: Int[Array, " b"] | None = None
    """Which of the layer's KV heads is the first one here; None for the first of all."""

    @property
    def static(self) -> Gumbel:
        """What kernels are compiled for."""
        return self._replace(seed=None, tau=None, first=None)  # type: ignore[arg-type]


class Decoded(NamedTuple):
    """Attention of one token per row, a part that `pallas_kernels.attention.merge` can merge further."""

    out: Float[Array, "b h g e"]
    """Over slots and low-rank share together; zeros where there is neither. At least float32."""
    lse: Float[Array, "b h g"]
    """Logarithm of the sum of exponentials, of the same."""
    scores: Array | None
    """Probabilities over the slots alone, [b h g c] for `each` and [b h c] for `sum` and `gumbel`; 0 where empty."""
