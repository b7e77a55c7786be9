"""Residuals: what becomes of a pair that is evicted."""

from __future__ import annotations

import abc
from typing import Any

from jaxtyping import Array

from kvjax.policies.base import Part
from kvjax.types import Evicted, New, Partial
from pallas_kernels.attention import LowRank, merge, share_of_evicted


class Residual(Part):
    """Remembers evicted pairs in memory of constant size, and lets queries read it."""

    @abc.abstractmethod
    def absorb(self, state: Any, evicted: Evicted) -> Any:
        """What is remembered of the layer, with some evicted pairs folded in."""

    @abc.abstractmethod
    def share(self, state: Any, new: New) -> LowRank:
        """The evicted tokens' share of the attention of `new.q`."""

    def step(self, state: Any, evicted: Evicted, new: New, attended: Partial) -> tuple[Any, Array]:
        """`absorb` of what a token per row has evicted, and its attention [b h g 1 e] with the `share` of all of that.

        Args:
            state: what is remembered of the layer.
            evicted: one pair of each head.
            new: one token per row.
            attended: its attention over the slots.
        """
        state = self.absorb(state, evicted)
        return state, merge(attended, share_of_evicted(self.share(state, new))).out
