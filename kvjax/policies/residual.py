"""Residuals: what becomes of a pair that is evicted."""

from __future__ import annotations

import abc
from typing import Any

from kvjax.policies.part import Part
from kvjax.types import Evicted, New
from pallas_kernels.attention import LowRank


class Residual(Part):
    """Remembers evicted pairs in memory of constant size, and lets queries read it."""

    @abc.abstractmethod
    def absorb(self, state: Any, evicted: Evicted) -> Any:
        """What is remembered of the layer, with some evicted pairs folded in."""

    @abc.abstractmethod
    def share(self, state: Any, new: New) -> LowRank:
        """The evicted tokens' share of the attention of `new.q`."""
