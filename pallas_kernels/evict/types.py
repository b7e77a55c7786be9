"""Inputs of eviction."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.ranking import Protection


@dataclasses.dataclass(frozen=True, eq=False)
class EvictInputs:
    """Arguments of eviction; see `api.evict`."""

    scores: Float[Array, "b h c"] | None
    position: Int[Array, "b h c"]
    new_position: Int[Array, " b"]
    buffers: Any
    added: Any
    protection: Protection
    keep: Bool[Array, "b h c"] | None = None
    shrinks: bool = False
    pairs: bool = True
