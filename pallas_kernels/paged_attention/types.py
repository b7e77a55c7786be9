"""What attention over pages gives back."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Int

Places = tuple[Int[Array, "b h"], Int[Array, "P s"]]
"""Where the model sees the query and the keys, if not at their positions."""


class Paged(NamedTuple):
    """Attention of one token per row over its heads' pages, a part that `pallas_kernels.attention.merge` can merge."""

    out: Float[Array, "b h g e"]
    """Zeros for a head that sees nothing. At least float32."""
    lse: Float[Array, "b h g"]
    """Logarithm of the sum of exponentials."""
    logits: Float[Array, "P_or_more g s"]
    """Of the pages that were visited, the lowest number where a slot is not seen; of other pages, and of those that may
    follow the pool's, anything at all."""
