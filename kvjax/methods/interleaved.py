"""Plan that alternates between layers with many and with few slots, as a control."""

from __future__ import annotations

import numpy as np

from kvjax.methods.register import register_part
from kvjax.policies.allocation import Plan
from kvjax.types import at_least, number


@register_part("interleaved")
class Interleaved(Plan):
    r"""One layer in every `period`, the first of them included, gets `ratio` times the slots of the others.

    .. math:: C_l \propto r \ \text{if}\ l \equiv 0 \pmod{\text{period}}, \ \text{else}\ 1

    From: kvjax, as a control for plans that increase or decrease over the layers.

    When: to find layers that need more slots. With `h2o` it equals `uniform` at a quarter of the slots (perplexity 14.8
    and 14.9) and is worse at a tenth (19.0 and 18.0; SmolLM2 on WikiText-2).

    Args:
        period: number of layers from one layer with more slots to the next, at least 2.
        ratio: slots of such a layer divided by those of the others, at least 1.
    """

    period: int = number(2, at_least(2, "a number of layers"))
    ratio: float = number(4.0, at_least(1, "a ratio"))

    def layer_budgets(self, budget: int, layers: int) -> np.ndarray:
        weights = np.where(np.arange(layers) % self.period == 0, self.ratio, 1.0)
        return weights * (budget * layers / weights.sum())
