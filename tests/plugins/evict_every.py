"""Eviction of many tokens at once, as VaSE, TriAttention and R-KV have it."""

from __future__ import annotations

import dataclasses

import numpy as np
from flax import struct
from jaxtyping import Array, Int

import kvjax
from kvjax.types import check, setting


@struct.dataclass
class EvictEvery(kvjax.Plan):
    r"""Let a head grow by `every` - 1 slots beyond its budget C, and then evict `every` tokens at once.

    .. math:: C(n) = C + (n - 1) \bmod r

    for a text of n tokens, the one being read included. Tokens are evicted before each position that r divides.

    Args:
        every: r, tokens from one eviction to the next.
        plan: budgets of the layers.
    """

    every: int = setting(128)
    plan: kvjax.Plan = kvjax.methods.PLANS["uniform"]()

    def __post_init__(self) -> None:
        check(self.every >= 1, "every", self.every, "a number of tokens from 1")

    @property
    def sizing(self) -> kvjax.Sizing:
        """Several tokens leave at once; buffers hold C + r - 1 slots."""
        return kvjax.Sizing(may_shrink=True, spare_slots=self.every - 1)

    def spread_by(self, other: kvjax.Plan) -> EvictEvery:
        """Return this plan with the budgets of another.

        Raises:
            ValueError: the other plan gives each head its own slots; pages evict one token at a time.
        """
        if other.sizing.per_head:
            raise ValueError(
                f"EvictEvery evicts {self.every} tokens at once, which heads on pages cannot; choose another plan than "
                f"{type(other).__name__}."
            )
        return dataclasses.replace(self, plan=other)

    def layer_budgets(self, budget: int, layers: int) -> np.ndarray:
        """Return those of the other plan."""
        return self.plan.layer_budgets(budget, layers)

    def slots_at(self, limit: Int[Array, "b h"], length: Int[Array, " b"]) -> Int[Array, "b h"]:
        """Return C(n)."""
        return limit + ((length - 1) % self.every)[:, None]
