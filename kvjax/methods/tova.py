"""TOVA: evict the token with the least attention from the newest query."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from kvjax.methods.combine import combine
from kvjax.methods.register import register
from kvjax.policies.policy import Policy
from kvjax.policies.score import Requirements, Score
from kvjax.policies.stats import Sums
from kvjax.types import Heads, New, PyTree, View, nothing, wide


@struct.dataclass
class LastAttention(Score):
    r"""Last attention, one score for all heads of a layer.

    .. math:: F_t(i) = \frac{1}{H} \sum_{h} a_{t,h}(i)

    averaged over the H query heads of the layer, for the newest query only.
    """

    paper = "TOVA, Oren et al. 2024, section 4"

    @property
    def requires(self) -> Requirements:
        """One score for all heads of a layer, which hold the same tokens."""
        return Requirements(shared_slots="heads")

    def slot(self, new: New, state: PyTree) -> Float[Array, "b h t"]:
        """Return zeros: no query has attended to the new tokens yet."""
        return nothing(new)

    def asks(self, heads: Heads, new: New) -> Sums:
        """Request a_t of the newest token, a mean over the layer's heads."""
        weights = _newest(new)[:, None].astype(wide(new.q.dtype)) if new.position.shape[1] > 1 else None
        return Sums(weights, over="layer")

    def fold(self, answers: Float[Array, "b h c"], view: View, new: New) -> Float[Array, "b h c"]:
        """Return F_t = a_t, summed over the query group, which ranks tokens as the mean does."""
        return jnp.where(_newest(new).any(1)[:, None, None], answers, view.slots.score)

    def score(self, view: View, new: New) -> Float[Array, "b h c"]:
        """Return F_t."""
        return view.slots.score


def _newest(new: New) -> Bool[Array, "b t"]:
    return new.valid & (new.position == new.newest[:, None])


@register(paper="TOVA, 4", group="ranked by attention at every token")
def tova(*, recent: int | float = 1, **common: Any) -> Policy:
    """Last attention, one score for all heads of a layer.

    When: for questions about a long prompt. It finds a needle in the middle of 1,024 tokens with half (4 of 4) and a
    quarter of the slots (2 of 4), where `h2o` finds none. For continuing text `h2o` is better.
    """
    return combine(LastAttention(), recent=recent, **common)
