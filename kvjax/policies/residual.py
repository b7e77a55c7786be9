"""Residuals: constant-size memory of evicted pairs."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

from jaxtyping import Array

from kvjax.policies.base import Part
from kvjax.types import Evicted, New, Partial
from pallas_kernels.attention import LowRank, merge, share_of_evicted

if TYPE_CHECKING:
    from typing import Self


class Residual(Part, interface=True):
    """Memory of constant size that absorbs evicted pairs and that queries attend to."""

    def over(self, base: str) -> Self:
        """Return a copy for the policy that evicts; override if the memory depends on it.

        Args:
            base: registered name of the policy.
        """
        return self

    @abc.abstractmethod
    def absorb(self, state: Any, evicted: Evicted) -> Any:
        """Return the layer's state with some evicted pairs added to it."""

    @abc.abstractmethod
    def share(self, state: Any, new: New) -> LowRank | Partial:
        """Return the attention of `new.q` to evicted pairs; kernels merge one of low rank in the same pass."""

    def step(self, state: Any, evicted: Evicted, new: New, attended: Partial) -> tuple[Any, Array]:
        """Absorb the pairs that one token per row evicted, and merge `share` into the token's attention.

        Args:
            state: state of the layer.
            evicted: one pair per head.
            new: one token per row.
            attended: attention of the token over the slots.

        Returns:
            The new state, and attention [b h g 1 e] over slots and evicted pairs.
        """
        state = self.absorb(state, evicted)
        return state, merge(attended, share_of_evicted(self.share(state, new))).out
