"""CriticalKV (Feng et al. 2025, arXiv 2502.03805): scores of another method and norms of projected values."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.methods.outputs import output_weights
from kvjax.methods.register import register
from kvjax.methods.registry import base_policy, name_of
from kvjax.models.model import LanguageModel
from kvjax.policies import Policy, Requirements, ScoreOver, SplitRanking, as_numbers, is_ranked, recent_slots
from kvjax.types import LayerTokens, PyTree, View, number, wide

BLOCK = 128
"""Number of tokens whose projected values are in memory at a time."""


class Critical(ScoreOver):
    r"""Tokens with the highest scores, then those with the highest products of score and norm of the projected value.

    .. math:: F(i) = \begin{cases} \infty & i \text{ among the } \lfloor (C - C_{kept}) / 2 \rfloor \text{ highest } s
        \\ (s_i + \epsilon) \frac 1 G \sum_g \lVert W^O_g v_i \rVert_1 & \text{else} \end{cases}

    with the nonnegative score s of the base, the C slots of a head and the columns W^O_g of the output weights that
    belong to query head g. The C_kept sinks and recent tokens are always kept. With the plan `adakv`, heads compete by
    s, as in the authors' code, and each then ranks by the F of its own C.

    In the authors' code, s is SnapKV's mean attention of a window, and the half is that of all C slots, recent tokens
    included. Under `h2o`, s is a sum over all queries, beside which the same epsilon is smaller by their number.

    Args:
        sinks: first tokens, which are protected.
        recent: newest tokens, which are protected.
        epsilon: added to s.
        outputs: output weights of each layer, set by `bind`, in the order in which a product takes them without a copy;
            after `layer`, those of one layer.
    """

    of_heads = ("outputs",)

    sinks: int = number(0)
    recent: int | float = number(0)
    epsilon: float = number(1e-4)
    outputs: tuple[Float[Array, "h e g width"], ...] | Float[Array, "h e g width"] | None = None

    @property
    def requires(self) -> Requirements:
        return dataclasses.replace(self.base_score.requires, whole_heads=True)

    def bind(self, model: LanguageModel) -> Critical:
        weights = output_weights(model, lambda weights: weights.swapaxes(1, 2))
        return super().bind(model).replace(outputs=weights)

    def init_slot(self, new: LayerTokens, state: Any) -> tuple[PyTree, Float[Array, "b h t"]]:
        """Return the base's state of each token, and the norm of its projected value."""
        return self.base_score.init_slot(new, state), self._norms(new.v)

    def update_slot(self, stats: PyTree, view: View, new: LayerTokens) -> PyTree:
        return self.base_score.update_slot(stats, _of_base(view), new), view.slots.score[1]

    def score(self, view: View, new: LayerTokens) -> SplitRanking:
        """Return F within heads, and s between them."""
        base = _of_base(view)
        s = as_numbers(self.base_score.score(base, new), base)
        scaled = (s + self.epsilon) * view.slots.score[1].astype(s.dtype)
        position, all_scores = map(new.spread.all_slots, (view.position, s))
        recent = jnp.broadcast_to(recent_slots(self.recent, view.limit), view.limit.shape)
        free = (position >= self.sinks) & (position <= (new.newest[:, None] - recent)[..., None])
        best_first = jnp.lexsort((-position, jnp.where(free, -all_scores, jnp.inf)))
        half = jnp.maximum(view.limit - self.sinks - recent, 0) // 2
        critical = free & (jnp.argsort(best_first, axis=-1) < half[..., None])
        highest = float(jnp.finfo(s.dtype).max) / 4
        scores = jnp.where(is_ranked(s) & jnp.isfinite(scaled), scaled, s)
        return SplitRanking(jnp.where(new.spread.own_slots(critical), highest, scores), s)

    def _norms(self, v: Float[Array, "b h t e"]) -> Float[Array, "b h t"]:
        if self.outputs is None:
            return jnp.zeros(v.shape[:3], wide(v.dtype))

        def of(values: Array) -> Array:
            projected = jnp.einsum("hegw,bhte->bhgtw", self.outputs, values.astype(wide(v.dtype)))
            return jnp.abs(projected).sum(-1).mean(2)

        tokens = v.shape[2]
        if tokens <= BLOCK:
            return of(v)
        blocks = jnp.pad(v, ((0, 0), (0, 0), (0, -tokens % BLOCK), (0, 0)))
        blocks = jnp.moveaxis(blocks.reshape(*v.shape[:2], -1, BLOCK, v.shape[3]), 2, 0)
        return jnp.moveaxis(jax.lax.map(of, blocks), 0, 2).reshape(*v.shape[:2], -1)[..., :tokens]


def _of_base(view: View) -> View:
    return view.replace(slots=view.slots.replace(score=view.slots.score[0]))


@register(paper="CriticalKV, Algorithm 1", group="over another policy")
def criticalkv(*, base: str | Policy = "h2o", epsilon: float = Critical.epsilon, **settings: Any) -> Policy:
    """Half of the budget by another method's score, the rest by that score times the norm of the projected value.

    When: over a nonnegative score, such as accumulated attention. It has not been measured on many models yet.

    Args:
        base: the policy that ranks: a name or a `Policy`.

    Raises:
        ValueError: the base keeps the same tokens in all heads.
    """
    chosen = base_policy(base, settings)
    name = name_of(chosen)
    if chosen.score.requires.shared_slots != "none":
        raise ValueError(f"policy criticalkv ranks each head by itself, but {name} keeps the same tokens in all heads.")
    guard = chosen.protection
    score = Critical(chosen.score, name, guard.sinks, guard.recent, epsilon)
    return dataclasses.replace(chosen, score=score, name="criticalkv")
