"""ExpectedAttention: expected attention of queries at the next positions, times the norm of the value."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from kvjax.methods.combine import combine
from kvjax.methods.register import register
from kvjax.policies.policy import Policy
from kvjax.policies.queries import QueryMoments, turned_ahead
from kvjax.policies.score import PromptScore
from kvjax.types import Heads, New, View, check, number, setting, wide, written


@struct.dataclass
class ExpectedAttention(PromptScore):
    r"""Expected attention to a key by Gaussian queries at the next positions, times the norm of its value.

    .. math::
        F(i) = (\epsilon + \frac 1 G \sum_g \mathrm{softmax}_i \, x_{gi}) \lVert v_i \rVert, \quad
        x_{gi} = \frac{k_i^\top \mu_g}{\sqrt d} + \frac{k_i^\top \Sigma_g k_i}{2 d}, \quad
        \mu_g = \bar R m_g, \quad \Sigma_g = \bar R S_g \bar R^\top

    m and S are the mean and the covariance of a query head's queries in the prompt and turns, before rotation and
    without the first positions. R is the mean rotation of the next 512 positions.

    Args:
        sinks: number of first positions, which are excluded from m, S and the softmax.
        future: number of next positions over which rotations are averaged.
        epsilon: constant added to the attention; 0.01 with the plan `adakv` in the published results.
    """

    paper = "ExpectedAttention, Devoto et al. 2025"

    sinks: int = setting(4)
    future: int = setting(512)
    epsilon: float = number(0.0)

    def __post_init__(self) -> None:
        check(self.future >= 1, "future", self.future, "a number of positions from 1")
        check(not written(self.epsilon) or self.epsilon >= 0, "epsilon", self.epsilon, "a number from 0")

    def init(self, shape: New) -> QueryMoments:
        """Return the moments of no queries."""
        return QueryMoments.none(shape)

    def advance(self, heads: Heads, new: New) -> QueryMoments:
        """Return the moments with the new queries included."""
        return heads.state.score.joined(new, self.sinks)

    def _ranked(self, view: View, new: New) -> Float[Array, "b h c"]:
        """Return F."""
        moments, kind = self.advance(view, new), wide(new.k.dtype)
        assert moments.spread is not None
        keys, values = view.keys(new).astype(kind), view.values(new).astype(kind)
        mean = turned_ahead(moments.mean, new, self.future)
        rows = jax.vmap(lambda x: turned_ahead(x, new, self.future), -2, -2)
        spread = rows(jnp.swapaxes(rows(moments.spread), -1, -2))
        spread /= jnp.maximum(moments.count, 1.0)[..., None, None, None]
        scale = keys.shape[-1] ** -0.5 if new.config is None else new.config.scale
        logits = scale * jnp.einsum("bhcd,bhgd->bhgc", keys, mean)
        logits += scale**2 / 2 * jnp.einsum("bhcd,bhgde,bhce->bhgc", keys, spread, keys)
        ranked = (view.live & (view.position >= self.sinks))[:, :, None]
        attention = jax.nn.softmax(jnp.where(ranked, logits, -jnp.inf), axis=-1, where=ranked).mean(2)
        return (attention + self.epsilon) * jnp.linalg.norm(values, axis=-1)


@register(paper="Devoto et al. 2025", group="ranked once for each prompt or turn")
def expected_attention(
    *,
    sinks: int = ExpectedAttention.sinks,
    recent: int | float = 32,
    future: int = ExpectedAttention.future,
    epsilon: float = ExpectedAttention.epsilon,
    **common: Any,
) -> Policy:
    """Attention expected from queries at the next positions, times the norm of the value.

    When: if a prompt is compressed before the question is known. It has not been measured on many models yet. The paper
    evicts nothing after the prompt. Here generated tokens are evicted first, except the newest `recent` ones.
    """
    return combine(ExpectedAttention(sinks, future, epsilon), sinks=sinks, recent=recent, **common)
