"""StreamingLLM: sinks and a recent window, with keys at their positions in the cache."""

from __future__ import annotations

from typing import Any

from kvjax.methods.register import combine, register
from kvjax.methods.window import Recency
from kvjax.policies.policy import Policy


@register(paper="StreamingLLM, 3.2", group="ranked by position")
def streaming(*, sinks: int = 4, positions: str = "cache", **common: Any) -> Policy:
    """Keep the first and the most recent tokens, with keys at their positions in the cache.

    When: if attention probabilities are not available, or for endless text: the embedded model, trained on 1,152
    positions, keeps its quality over 20,000 tokens on 256 slots.
    """
    return combine(Recency(), sinks=sinks, positions=positions, **common)
