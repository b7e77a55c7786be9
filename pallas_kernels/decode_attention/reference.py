"""Decode attention in XLA: kvjax's attention, and scores from its probabilities."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels import noise
from pallas_kernels.attention import AttentionSpec, attend, causal_mask, merge, share_of_evicted
from pallas_kernels.decode_attention.types import Decoded, Gumbel, LowRank


def decode_attention(
    q: Float[Array, "b h g d"],
    k: Float[Array, "b h c d"],
    v: Float[Array, "b h c d"],
    position: Int[Array, "b h c"],
    query_position: Int[Array, " b"],
    *,
    window: int | None,
    slopes: Float[Array, "h g"] | None,
    low_rank: LowRank | None,
    scores: str | Gumbel | None,
) -> Decoded:
    """See `api.decode_attention`."""
    query = query_position[:, None]
    mask = causal_mask(query, position, window)
    bias = None
    if slopes is not None:
        distance = position[:, :, None, None, :] - query[:, :, None, None, None]
        bias = slopes[None, :, :, None, None] * distance
    partial, probs = attend(q[:, :, :, None], k, v, mask, AttentionSpec(q.shape[-1] ** -0.5), bias)
    if low_rank is not None:
        token = low_rank._replace(features=low_rank.features[:, :, :, None])
        partial = merge(partial, share_of_evicted(token))
    if isinstance(scores, Gumbel):
        found = increments(probs[:, :, :, 0], position, scores)
    else:  # the sum over both axes: summed over one of them, XLA takes four times as long on a CPU
        found = {None: None, "each": probs[:, :, :, 0], "sum": probs.sum((2, 3))}[scores]
    return Decoded(partial.out[:, :, :, 0], partial.lse[:, :, :, 0], found)


def increments(probs: Float[Array, "b h g c"], position: Int[Array, "b h c"], gumbel: Gumbel) -> Float[Array, "b h c"]:
    """Equation 9 from probabilities: softmax((log p + zeta)/tau) = softmax((x + zeta)/tau), summed over the group."""
    tau = gumbel.tau.astype(probs.dtype)[:, None, None]
    tempered = jnp.exp(jnp.log(probs) / tau[..., None])  # a third of the time of a power on a CPU
    factor = jnp.exp(drawn(gumbel, position, probs.dtype) / tau)
    total = jnp.einsum("bhgc,bhc->bhg", tempered, factor)
    share = jnp.where(total > 0, 1.0, 0.0) / jnp.where(total > 0, total, 1.0)
    return factor * jnp.einsum("bhgc,bhg->bhc", tempered, share)


def drawn(gumbel: Gumbel, position: Int[Array, "b h c"], dtype: DTypeLike = jnp.float32) -> Float[Array, "b h c"]:
    """zeta of every slot."""
    if gumbel.noise == "none":
        return jnp.zeros(position.shape, dtype)
    kinds = {"gumbel": noise.gumbel, "gaussian": noise.gaussian}
    return kinds[gumbel.noise](noise.uniform_at(gumbel.seed, gumbel.layer, position).astype(dtype))
