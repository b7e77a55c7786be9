"""CapKV (arXiv 2604.25975): values that span directions which other tokens near the expected query do not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.methods.register import register_score
from kvjax.policies.queries import Expected, MomentScore
from kvjax.types import LayerTokens, View, at_least, number


@register_score("capkv", paper="CapKV, 2026", group="ranked once for each prompt or turn", recent=32)
class Capacity(MomentScore):
    r"""Leverage of a value among all values, weighted by how well keys match the mean query.

    .. math::
        F(i) = \frac 1 G \sum_g w_{gi} \, v_i^\top A_g^{-1} v_i, \quad A_g = I + \sum_j w_{gj} v_j v_j^\top, \quad
        w_{gi} = \exp(\tau (\cos(k_i, \mu_g) - \max_j \cos(k_j, \mu_g)))

    over the head's cached tokens except the first positions. The query mu is the mean query of the prompt and turns,
    per query head, before rotation and without the first positions, multiplied by the mean rotation of the next 512
    positions.

    These are the weights of CapPress in kvpress; the paper, it notes, has exp(tau k . mu), without norms and rotation.
    Keys only weigh tokens: those with unusual values rank high, not those with unusual keys.

    When: if a prompt is compressed before the question is known. It has not been measured on many models yet. The paper
    evicts nothing after the prompt. Here generated tokens are evicted first, except the newest `recent` ones.

    Args:
        tau: sharpness of the weights.
    """

    covariance = False

    tau: float = number(5.0, at_least(0, "a number"))

    def _expected(self, of: Expected, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        keys, values, mean, counts = of.keys, of.values, of.mean, of.counts[:, :, None]
        match = jnp.where(counts, jnp.einsum("bhcd,bhgd->bhgc", _unit(keys), _unit(mean)), -jnp.inf)
        highest = match.max(-1, keepdims=True)
        weights = jnp.where(counts, jnp.exp(self.tau * (match - jnp.where(highest > -jnp.inf, highest, 0.0))), 0.0)
        inside = jnp.where(counts[:, :, 0, :, None], values, 0.0)
        capacity = jnp.einsum("bhgc,bhce,bhcf->bhgef", weights, inside, inside)
        root = jnp.linalg.cholesky(capacity + jnp.eye(values.shape[-1], dtype=values.dtype))

        def leverage(root: Float[Array, "b h e e"]) -> Float[Array, "b h c"]:
            solved = jax.scipy.linalg.solve_triangular(root, jnp.swapaxes(inside, 2, 3), lower=True)
            return (solved**2).sum(2)

        return (weights * jax.vmap(leverage, 2, 2)(root)).mean(2)


def _unit(x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
