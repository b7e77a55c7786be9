"""RoPE of one token's queries and keys in plain XLA."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float

from pallas_kernels.operands import turn


@dataclasses.dataclass(frozen=True, eq=False)
class RotateInputs:
    """Arguments of a rotation; see `api.rotate`."""

    turned: tuple[Float[Array, "b n d"], ...]
    cos: Float[Array, "b w"]
    sin: Float[Array, "b w"]
    still: tuple[Float[Array, "b n d"], ...] = ()
    interleaved: bool = False

    @property
    def heads(self) -> list[Float[Array, "b n d"]]:
        """Queries, keys and values."""
        return [*self.turned, *self.still]


def rotate(x: RotateInputs) -> tuple[Float[Array, "b n d"], ...]:
    """See `api.rotate`."""
    return (*(turn(heads, x.cos[:, None], x.sin[:, None], x.interleaved) for heads in x.turned), *x.still)
