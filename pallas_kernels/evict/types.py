"""Inputs of eviction."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention import static
from pallas_kernels.ranking import Protection


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class EvictInputs:
    """Arguments of eviction; see `api.evict`. Kernels get references to blocks of them in the same record."""

    scores: Float[Array, "b h c"] | None
    position: Int[Array, "b h c"]
    new_position: Int[Array, " b"]
    buffers: Any
    added: Any
    protection: Protection
    keep: Bool[Array, "b h c"] | None = None
    shrinks: bool = static(False)
    pairs: bool = static(True)
