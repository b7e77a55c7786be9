"""RoPE of one token's queries and keys in plain XLA."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Array, Float

from pallas_kernels.operands import turn


def rotate(
    turned: Sequence[Float[Array, "b n d"]],
    cos: Float[Array, "b w"],
    sin: Float[Array, "b w"],
    still: Sequence[Float[Array, "b n d"]],
    interleaved: bool,
) -> tuple[Float[Array, "b n d"], ...]:
    """See `api.rotate`."""
    return (*(turn(x, cos[:, None], sin[:, None], interleaved) for x in turned), *still)
