"""Attention statistics that wait for others, before they update a score: sums over layers, or over devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from kvjax.policies.stats import is_ask, sums_over
from kvjax.types import New, PyTree


class Pending(NamedTuple):
    """Attention statistics of a layer, before the score is updated with them."""

    asks: PyTree
    """Requests, one for each statistic."""
    answers: Any
    """Statistics, in the form of the kind of cache."""
    new: New
    """Tokens that attended."""

    @property
    def over_layers(self) -> bool:
        """True if a statistic is to be summed over all layers."""
        return sums_over(self.asks, "model")

    @property
    def over_devices(self) -> bool:
        """True if a statistic is to be summed over devices."""
        return sums_over(self.asks, "device")


def sum_over_layers(pending: Sequence[Pending]) -> list[Pending]:
    """Replace the statistics that are requested over all layers by their sums over the layers."""
    if not pending:
        return []
    answers = [stats.answers for stats in pending]

    def total(ask: Any, *parts: Any) -> Any:
        return sum(parts) if sums_over(ask, "model") else None

    def choose(ask: Any, sums: Any, of_layer: Any) -> Any:
        return sums if sums_over(ask, "model") else of_layer

    totals = jax.tree.map(total, pending[0].asks, *answers, is_leaf=is_ask)
    return [
        stats._replace(answers=jax.tree.map(choose, stats.asks, totals, stats.answers, is_leaf=is_ask))
        for stats in pending
    ]
