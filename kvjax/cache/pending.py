"""Attention statistics that wait for others, before they update a score: sums over layers, or over devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from kvjax.policies.stats import is_request, sums_over
from kvjax.types import LayerTokens, PyTree


class Pending(NamedTuple):
    """Attention statistics of a layer, before the score is updated with them."""

    requests: PyTree
    """Requests, one for each statistic."""
    stats: Any
    """Statistics, in the form of the kind of cache."""
    new: LayerTokens
    """Tokens that attended."""

    @property
    def over_layers(self) -> bool:
        """True if a statistic is to be summed over all layers."""
        return sums_over(self.requests, "model")


def sum_over_layers(pending: Sequence[Pending]) -> list[Pending]:
    """Replace the statistics that are requested over all layers by their sums over the layers."""
    if not pending:
        return []
    stats = [stats.stats for stats in pending]

    def total(request: Any, *parts: Any) -> Any:
        return sum(parts) if sums_over(request, "model") else None

    def choose(request: Any, sums: Any, of_layer: Any) -> Any:
        return sums if sums_over(request, "model") else of_layer

    totals = jax.tree.map(total, pending[0].requests, *stats, is_leaf=is_request)
    return [
        stats._replace(stats=jax.tree.map(choose, stats.requests, totals, stats.stats, is_leaf=is_request))
        for stats in pending
    ]
