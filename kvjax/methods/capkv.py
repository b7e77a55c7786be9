"""CapKV: tokens whose values span directions that other tokens near the expected query do not."""

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
class Capacity(PromptScore):
    r"""Leverage of a value among all values, weighted by how well keys match the mean query.

    .. math::
        F(i) = \frac 1 G \sum_g w_{gi} \, v_i^\top A_g^{-1} v_i, \quad A_g = I + \sum_j w_{gj} v_j v_j^\top, \quad
        w_{gi} = \exp(\tau (\cos(k_i, \mu_g) - \max_j \cos(k_j, \mu_g)))

    over the head's cached tokens except the first positions. The query mu is the mean query of the prompt and turns,
    per query head, before rotation and without the first positions, multiplied by the mean rotation of the next 512
    positions.

    Args:
        sinks: number of first positions, which are excluded from queries and keys.
        tau: sharpness of the weights.
        future: number of next positions over which rotations are averaged.
    """

    paper = "CapKV, arXiv 2604.25975"

    sinks: int = setting(4)
    tau: float = number(5.0)
    future: int = setting(512)

    def __post_init__(self) -> None:
        check(self.future >= 1, "future", self.future, "a number of positions from 1")
        check(not written(self.tau) or self.tau >= 0, "tau", self.tau, "a number from 0")

    def init(self, shape: New) -> QueryMoments:
        """Return the mean of no queries."""
        return QueryMoments.none(shape, covariance=False)

    def advance(self, heads: Heads, new: New) -> QueryMoments:
        """Return the mean with the new queries included."""
        return heads.state.score.joined(new, self.sinks)

    def _ranked(self, view: View, new: New) -> Float[Array, "b h c"]:
        """Return F."""
        kind = wide(new.k.dtype)
        keys, values = view.keys(new).astype(kind), view.values(new).astype(kind)
        mean = turned_ahead(self.advance(view, new).mean, new, self.future)
        counts = (view.live & (view.position >= self.sinks))[:, :, None]
        match = jnp.where(counts, jnp.einsum("bhcd,bhgd->bhgc", _unit(keys), _unit(mean)), -jnp.inf)
        most = match.max(-1, keepdims=True)
        weights = jnp.where(counts, jnp.exp(self.tau * (match - jnp.where(most > -jnp.inf, most, 0.0))), 0.0)
        inside = jnp.where(counts[:, :, 0, :, None], values, 0.0)
        capacity = jnp.einsum("bhgc,bhce,bhcf->bhgef", weights, inside, inside)
        root = jnp.linalg.cholesky(capacity + jnp.eye(values.shape[-1], dtype=kind))

        def leverage(root: Float[Array, "b h e e"]) -> Float[Array, "b h c"]:
            solved = jax.scipy.linalg.solve_triangular(root, jnp.swapaxes(inside, 2, 3), lower=True)
            return (solved**2).sum(2)

        return (weights * jax.vmap(leverage, 2, 2)(root)).mean(2)


def _unit(x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


@register(paper="CapKV, 2026", group="ranked once for each prompt or turn")
def capkv(
    *,
    sinks: int = Capacity.sinks,
    recent: int | float = 32,
    tau: float = Capacity.tau,
    future: int = Capacity.future,
    **common: Any,
) -> Policy:
    """Leverage of values, weighted by how well keys match the mean query.

    When: if a prompt is compressed before the question is known. It has not been measured on many models yet. The paper
    evicts nothing after the prompt. Here generated tokens are evicted first, except the newest `recent` ones.
    """
    return combine(Capacity(sinks, tau, future), sinks=sinks, recent=recent, **common)
