"""Inputs of decode attention besides slots, and its result."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.attention import AttentionSpec, Partial, merge, share_of_evicted, static
from pallas_kernels.attention import LowRank as LowRank
from pallas_kernels.operands import Operand

Places = tuple[Int[Array, "b h"], Int[Array, "b h c"]]
"""Model positions of the query and the keys, if they are not their positions in the text."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["q", "gap"], meta_fields=["count"])
@dataclasses.dataclass(frozen=True)
class Sinks:
    """First tokens that use the query from another place than the rest (StreamingLLM, section 3.2)."""

    q: Float[Array, "b h g d"]
    """Query for the sinks."""
    count: int
    """Number of sinks: they have the positions below it, and are in as many first slots."""
    gap: Int[Array, " b"] | None = None
    """Tokens by which a layer's slopes place the sinks nearer than in the text; None for no change."""

    def seen(self, position: Int[Array, "b h c"]) -> Int[Array, "b h c"]:
        """Return the places that a layer's slopes use for the tokens at these positions."""
        if self.gap is None:
            return position
        sinks = (position < self.count) & (jnp.arange(position.shape[2]) < self.count)
        return position + jnp.where(sinks, self.gap[:, None, None], 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gumbel:
    """Noise and temperature of Keyformer's score increments (equation 9)."""

    seed: UInt32[Array, " b"]
    """Random seed of each row, as in `pallas_kernels.noise.uniform_at`."""
    tau: Float[Array, " b"]
    """Temperature of each row, above 0."""
    layer: int = static(0)
    noise: str = static("gumbel")
    """`gumbel`, `gaussian` with the same mean and deviation, or `none`."""
    first: Int[Array, " b"] | None = None
    """Number of the first KV head here among the layer's; None for the layer's first."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class DecodeInputs:
    """Arguments of decode attention. Kernels get references to blocks of them in the same record."""

    q: Float[Array, "b h g d"]
    k: Operand
    """Keys [b h c d]."""
    v: Operand
    """Values [b h c e]."""
    position: Int[Array, "b h c"]
    query_position: Int[Array, " b"]
    spec: AttentionSpec
    places: Places | None = None
    low_rank: LowRank | None = None
    sinks: Sinks | None = None
    scores: str | Gumbel | None = None

    @property
    def gumbel(self) -> Gumbel | None:
        """The requested noise; None for scores without any."""
        return self.scores if isinstance(self.scores, Gumbel) else None

    def with_evicted(self, attended: Partial) -> Partial:
        """Merge attention over the slots with that to evicted tokens, if there is one."""
        if self.low_rank is None:
            return attended
        token = self.low_rank._replace(features=self.low_rank.features[:, :, :, None])
        return merge(attended, share_of_evicted(token))


class Decoded(NamedTuple):
    """Attention of one token per row."""

    out: Float[Array, "b h g e"]
    """Attention over slots and low-rank memory together, at least float32; zeros if both are empty."""
    lse: Float[Array, "b h g"]
    """Logarithm of the sum of exponentials over both."""
    scores: Array | None
    """Probabilities over the slots alone, [b h g c] for `each`, [b h c] for `sum` and a `Gumbel`; 0 in empty slots."""

    @property
    def partial(self) -> Partial:
        """The attention as `merge` takes it, with an axis of tokens."""
        return Partial(self.out[:, :, :, None], self.lse[..., None])
