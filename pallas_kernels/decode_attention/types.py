"""What decode attention takes besides slots, and what it gives back."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.attention import LowRank as LowRank

Places = tuple[Int[Array, "b h"], Int[Array, "b h c"]]
"""Where the model sees the query and the keys, if not at their positions."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["q", "gap"], meta_fields=["count"])
@dataclasses.dataclass(frozen=True)
class Sinks:
    """The first tokens, if they see the query from another place than the others do (StreamingLLM, section 3.2)."""

    q: Float[Array, "b h g d"]
    """The query as it stands to them."""
    count: int
    """They are those at positions below it, and lie in as many first slots."""
    gap: Int[Array, " b"] | None = None
    """How much nearer than in the text a layer's slopes see them; None for not at all."""

    def seen(self, position: Int[Array, "b h c"]) -> Int[Array, "b h c"]:
        """Where a layer's slopes see the tokens at these positions."""
        if self.gap is None:
            return position
        sinks = (position < self.count) & (jnp.arange(position.shape[2]) < self.count)
        return position + jnp.where(sinks, self.gap[:, None, None], 0)


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
