"""ExpectedAttention (Devoto et al. 2025): attention of queries at the next positions, times the value's norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.methods.register import register_score
from kvjax.policies.queries import Expected, MomentScore
from kvjax.types import LayerTokens, View, at_least, number


@register_score(
    "expected_attention", paper="Devoto et al. 2025", group="ranked once for each prompt or turn", recent=32
)
class ExpectedAttention(MomentScore):
    r"""Expected attention to a key by Gaussian queries at the next positions, times the norm of its value.

    .. math::
        F(i) = (\epsilon + \frac 1 G \sum_g \mathrm{softmax}_i \, x_{gi}) \lVert v_i \rVert, \quad
        x_{gi} = \frac{k_i^\top \mu_g}{\sqrt d} + \frac{k_i^\top \Sigma_g k_i}{2 d}, \quad
        \mu_g = \bar R m_g, \quad \Sigma_g = \bar R S_g \bar R^\top

    m and S are the mean and the covariance of a query head's queries in the prompt and turns, before rotation and
    without the first positions. R is the mean rotation of the next 512 positions.

    When: if a prompt is compressed before the question is known. It has not been measured on many models yet. The paper
    evicts nothing after the prompt. Here generated tokens are evicted first, except the newest `recent` ones.

    Args:
        epsilon: constant added to the attention; 0.01 with the plan `adakv` in the published results.
    """

    epsilon: float = number(0.0, at_least(0, "a number"))

    def _expected(self, of: Expected, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        assert of.spread is not None
        keys = of.keys
        scale = new.config.scale
        logits = scale * jnp.einsum("bhcd,bhgd->bhgc", keys, of.mean)
        logits += scale**2 / 2 * jnp.einsum("bhcd,bhgde,bhce->bhgc", keys, of.spread, keys)
        ranked = of.counts[:, :, None]
        attention = jax.nn.softmax(jnp.where(ranked, logits, -jnp.inf), axis=-1, where=ranked).mean(2)
        return (attention + self.epsilon) * jnp.linalg.norm(of.values, axis=-1)
