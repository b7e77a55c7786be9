"""Baseline+: the memory that LESS would take, spent on slots."""

from __future__ import annotations

from typing import ClassVar

from flax import struct

from kvjax.policies.base import check
from kvjax.policies.wrapper import Wrapper
from kvjax.types import setting


@struct.dataclass(kw_only=True)
class BaselinePlus(Wrapper):
    """Any policy with R/2 more slots per head: R x d numbers are R/2 keys and as many values.

    A recent window that is a fraction of the budget takes its share of them, as in H2O of the paper.

    Args:
        base: the policy, by name or made; further settings are its own.
        features: R, an even number from 2.
    """

    paper = "LESS, arXiv 2402.09398, section 4"

    features: int = setting(8)

    def __post_init__(self):
        super().__post_init__()
        even = isinstance(self.features, int) and self.features >= 2 and self.features % 2 == 0
        check(even, "features", self.features, "an even number from 2")

    extra_slots: ClassVar = property(lambda self: self.base.extra_slots + self.features // 2)
