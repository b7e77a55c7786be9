"""Inputs and result of attention over pages."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float, Int

from pallas_kernels.attention import AttentionSpec, Partial
from pallas_kernels.operands import Operand

Places = tuple[Int[Array, "b h"], Int[Array, "P s"]]
"""Model positions of the query and the keys, if they are not their positions in the text."""


@dataclasses.dataclass(frozen=True, eq=False)
class PagedInputs:
    """Arguments of attention over pages."""

    q: Float[Array, "b h g d"]
    k: Operand
    """Keys [P s d]."""
    v: Operand
    """Values [P s e]."""
    position: Int[Array, "P s"]
    owner: Int[Array, " P"]
    pages: Int[Array, "2"]
    query_position: Int[Array, " b"]
    spec: AttentionSpec
    places: Places | None = None
    logits: Float[Array, "P g s"] | None = None
    layers: int = 1


class Paged(NamedTuple):
    """Attention of one token per row over its heads' pages."""

    out: Float[Array, "b h g e"]
    """Attention, at least float32; zeros for a head that attends to nothing."""
    lse: Float[Array, "b h g"]
    """Logarithm of the sum of exponentials."""
    logits: Float[Array, "P_or_more g s"]
    """Logits of the visited pages, the lowest number in masked slots. Other pages, and any after the pool's, are
    arbitrary."""

    @property
    def partial(self) -> Partial:
        """The attention as `merge` takes it, with an axis of tokens."""
        return Partial(self.out[:, :, :, None], self.lse[..., None])
