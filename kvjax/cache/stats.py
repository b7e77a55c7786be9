"""Attention statistics that a policy's parts request, computed from attention probabilities."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvjax.policies.stats import (
    AttentionProbs,
    AttentionSum,
    Damage,
    Noise,
    Peak,
    Seen,
    StatRequest,
    flatten_requests,
    over_heads,
)
from kvjax.types import LayerTokens, PyTree
from pallas_kernels import noise as hashed
from pallas_kernels.attention import noisy_numerators as numerators
from pallas_kernels.operands import Operand, SplitKV
from pallas_kernels.operands import values as numbers


def stats_from_probs(
    requests: PyTree,
    probs: Float[Array, "b h g 1 c"],
    v: Operand | SplitKV,
    position: Int[Array, "b h c"],
    new: LayerTokens,
) -> PyTree:
    """Compute the requested statistics of one token per row from its attention over whole heads."""
    leaves, tree = flatten_requests(requests)
    return tree.unflatten(stat_from_probs(request, probs, v, position, new) for request in leaves)


def stat_from_probs(
    request: StatRequest,
    probs: Float[Array, "b h g 1 c"],
    v: Operand | SplitKV,
    position: Int[Array, "b h c"],
    new: LayerTokens,
    visible: Int[Array, "b h 1"] | None = None,
) -> Any:
    """Compute a requested statistic of one token per row; `visible` counts slots on other devices, too."""
    if isinstance(request, AttentionProbs):
        mask = seen_slots(position, new)
        return Seen(probs, new.position, mask.sum(-1) if visible is None else visible, mask)
    return over_heads(request, reduced(request, probs, v, position, new), new)


def seen_slots(position: Int[Array, "b h c"], new: LayerTokens) -> Bool[Array, "b h t c"]:
    """Return which slots each of the new tokens sees."""
    return new.config.spec.mask(new.position, position)


def sample_noise(noise: Noise, position: Int[Array, "b h c"], new: LayerTokens, dtype: DTypeLike) -> Array:
    """Return the noise zeta of every slot [b h c], or of every query and slot [b h t c] if `noise.fresh`."""
    query = new.position if noise.fresh else None
    return hashed.KINDS[noise.kind](hashed.uniform_at(new.seed, new.layer, position, query, new.head).astype(dtype))


def tempered(
    request: AttentionSum, probs: Float[Array, "b h g t c"], position: Int[Array, "b h c"], new: LayerTokens
) -> Float[Array, "b h g t c"]:
    """Return the numerators of the softmax that a request specifies."""
    tau = jnp.asarray(request.tau, probs.dtype)
    tau = tau[:, None, None, :, None] if tau.ndim else tau
    if request.noise is None:
        return numerators(probs, None, tau)
    zeta = sample_noise(request.noise, position, new, probs.dtype)
    return numerators(probs, zeta[:, :, None] if request.noise.fresh else zeta[:, :, None, None], tau)


def normalised(shares: Float[Array, "*#n c"], total: Float[Array, "*#n 1"]) -> Float[Array, "*n c"]:
    """Divide shares by their total; return zeros if the total is zero."""
    return jnp.where(total > 0, shares / jnp.where(total > 0, total, 1.0), 0.0)


def reduced(
    request: StatRequest,
    probs: Float[Array, "b h g t c"],
    v: Operand | SplitKV,
    position: Int[Array, "b h c"],
    new: LayerTokens,
) -> Float[Array, "b h *g c"]:
    """Compute a requested statistic of some queries from their probabilities, before it is reduced over heads."""
    if isinstance(request, Damage):
        values = numbers(v, probs.dtype).astype(probs.dtype)
        return damage(request, probs, values, jax.tree.map(new.spread.over_slots, outputs(probs, values)))
    if isinstance(request, Peak):
        return highest(request, probs)
    assert isinstance(request, AttentionSum)
    if not request.plain:
        probs = tempered(request, probs, position, new)
        probs = normalised(probs, probs.sum(-1, keepdims=True))
    return summed(request, probs)


class Outputs(NamedTuple):
    """Sums over slots that make up the output of each query: a slot with more than half of the attention, and the rest.

    The slot is kept apart because subtracting it from the whole output would cancel nearly equal numbers.
    """

    light_share: Float[Array, "b h g t"]
    """Attention to all other slots."""
    light: Float[Array, "b h g t e"]
    """Their values, weighted by it."""
    share: Float[Array, "b h g t"]
    """Attention to the heavy slot."""
    heavy: Float[Array, "b h g t e"]
    """Its value."""


def outputs(probs: Float[Array, "b h g t c"], values: Float[Array, "b h c e"]) -> Outputs:
    """Compute the part of each query's output that comes from these slots."""
    heavy = probs > 0.5
    light, share = jnp.where(heavy, 0.0, probs), jnp.where(heavy, probs, 0.0)
    weighted = (jnp.einsum("bhgtc,bhce->bhgte", x.astype(values.dtype), values) for x in (light, heavy))
    return Outputs(light.sum(-1), next(weighted), share.sum(-1), next(weighted))


def damage(
    request: Damage, probs: Float[Array, "b h g t c"], values: Float[Array, "b h c e"], of: Outputs
) -> Float[Array, "b h c"]:
    """Compute a requested `Damage` to the outputs of some queries."""
    out = of.light + of.share[..., None] * of.heavy
    norms = jnp.einsum("bhce,bhce->bhc", values, values)[:, :, None, None]
    distances = norms - 2 * jnp.einsum("bhgte,bhce->bhgtc", out, values) + (out**2).sum(-1, keepdims=True)
    light_mean = of.light / jnp.where(of.light_share > 0, of.light_share, 1.0)[..., None]
    of_heavy = of.share**2 * ((of.heavy - light_mean) ** 2).sum(-1)
    light = jnp.where(probs > 0.5, 0.0, probs)
    change = jnp.where(probs > 0.5, of_heavy[..., None], (light / (1 - light)) ** 2 * jnp.maximum(distances, 0.0))
    change = jnp.where(probs > 0, change, 0.0).sum(2)
    if request.weights is None:
        return change.sum(2)
    weights = jnp.broadcast_to(request.weights, change.shape[:3])
    return jnp.einsum("bhtc,bht->bhc", change, weights.astype(change.dtype))


def highest(request: Peak, probs: Float[Array, "b h g t c"]) -> Float[Array, "b h g c"]:
    """Return the largest weighted attention over queries."""
    if request.weights is not None:
        probs = probs * request.weights.astype(probs.dtype)[:, :, None, :, None]
    return probs.max(3)


def summed(request: AttentionSum, probs: Float[Array, "b h g t c"]) -> Float[Array, "b h c"]:
    """Sum attention over groups and queries."""
    if request.group == "max":
        probs = probs.max(2)
    elif request.weights is None:
        return probs.sum((2, 3))
    else:
        probs = probs.sum(2)
    if request.weights is None:
        return probs.sum(2)
    weights = jnp.broadcast_to(request.weights, probs.shape[:3])
    return jnp.einsum("bhtc,bht->bhc", probs, weights.astype(probs.dtype))
