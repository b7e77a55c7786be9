"""LM-Infinite: sinks and a recent window, with keys at their positions in the text."""

from __future__ import annotations

from typing import Any

from kvjax.methods.register import combine, register
from kvjax.methods.window import Recency
from kvjax.policies.policy import Policy


@register(paper="LM-Infinite, 3", group="ranked by position")
def lambda_mask(*, sinks: int = 4, **common: Any) -> Policy:
    """Keep the first and the most recent tokens, with keys at their positions in the text.

    When: in place of `streaming` within the trained length, where both have the same quality and keys are rotated only
    once. Beyond that length the embedded model loses up to 0.46 nats per token against `streaming`.
    """
    return combine(Recency(), sinks=sinks, **common)
