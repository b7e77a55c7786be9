"""Attention over prompts, for models: what will move below and above the floors as they are built."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.models.config import ModelConfig
from kvjax.types import Weighing
from pallas_kernels import attention as parts
from pallas_kernels.attention import (
    QUERY_BLOCK,
    SLOT_BLOCK,
    AttentionSpec,
    Partial,
    alibi_slopes,
    causal_mask,
    join_queries,
    merge,
    query_block,
    share_of_evicted,
    split_queries,
)
from pallas_kernels.prefill_scores import prefill_scores


def spec_of(config: ModelConfig) -> AttentionSpec:
    """How a model attends."""
    return AttentionSpec(config.head_width**-0.5, None, config.sliding_window, head_slopes(config))


def attend(q, k, v, mask: Bool[Array, "b #h t c"], bias=None):
    """`pallas_kernels.attention.attend` at the usual scale."""
    return parts.attend(q, k, v, mask, AttentionSpec(q.shape[-1] ** -0.5), bias)


def attend_prompt(
    config: ModelConfig,
    q: Float[Array, "b h g t d"],
    k: Float[Array, "b h c d"],
    v: Float[Array, "b h c d"],
    query_position: Int[Array, "b t"],
    key_position: Int[Array, "b #h c"],
    weighing: Weighing | None,
) -> tuple[Partial, Float[Array, "b h g c"] | None]:
    """Causal attention of a prompt or a chunk, and what each key got of it, without any n x n matrix.

    Args:
        config: of the model: its sliding window and ALiBi.
        q: queries, in the order of the text.
        k: keys; the queries' own are the last ones.
        v: values.
        query_position: -1 for padding.
        key_position: -1 for empty slots.
        weighing: how attention is summed up; None if it is not.
    """
    wanted = Weighing() if weighing is None else weighing
    out, lse, sums = prefill_scores(
        q,
        k,
        v,
        query_position,
        key_position,
        scores=weighing is not None,
        weights=wanted.weights,
        noise=wanted.noise,
        tau=wanted.tau,
        window=config.sliding_window,
        slopes=head_slopes(config),
    )
    return Partial(out, lse), sums


def near_sums(
    config: ModelConfig,
    q: Float[Array, "b h g t d"],
    k: Float[Array, "b h t d"],
    lse: Float[Array, "b h g t"],
    position: Int[Array, "b t"],
    width: Int[Array, "b t"] | None = None,
    most: int = 1,
) -> Float[Array, "b h t"]:
    """What each token of a whole prompt gets from the queries that come soon after it, in blocks along the diagonal.

    Args:
        config: of the model.
        q: queries.
        k: keys of the same tokens.
        lse: of the queries, from `attend_prompt`.
        position: of the tokens, rising by one; -1 for padding.
        width: how many of the newest tokens count for each query, itself included; None for itself alone.
        most: what no width exceeds.
    """
    b, h, _, t, d = q.shape
    kind = lse.dtype
    if width is None:
        logits = jnp.einsum("bhgtd,bhtd->bhgt", q, k, preferred_element_type=kind) * d**-0.5
        return jnp.where(position[:, None, None] >= 0, jnp.exp(logits - lse), 0.0).sum(2)
    size = query_block(t, b)
    span = min(t, -(-most // size) * size + size)

    def add(sums, queries):
        q, lse, at, width, first = queries
        start = jnp.maximum(first + size - span, 0)
        keys = jax.lax.dynamic_slice_in_dim(k, start, span, axis=2)
        where = jax.lax.dynamic_slice_in_dim(position, start, span, axis=1)
        logits = jnp.einsum("bhgtd,bhsd->bhgts", q, keys, preferred_element_type=kind) * d**-0.5
        bias = alibi_bias(config, at[:, None], where[:, None])
        logits = logits if bias is None else logits + bias
        seen = causal_mask(at, where[:, None], config.sliding_window)
        seen &= (at[:, :, None] - where[:, None] < width[..., None])[:, None]
        added = jnp.where(seen[:, :, None], jnp.exp(logits - lse[..., None]), 0.0).sum((2, 3))
        added += jax.lax.dynamic_slice_in_dim(sums, start, span, axis=2)
        return jax.lax.dynamic_update_slice_in_dim(sums, added, start, axis=2), None

    blocks = [split_queries(x, axis, size) for x, axis in ((q, -2), (lse, -1), (position, -1), (width, -1))]
    return jax.lax.scan(add, jnp.zeros((b, h, t), kind), (*blocks, jnp.arange(0, t, size)))[0]


def alibi_bias(
    config: ModelConfig, query_position: Int[Array, "b #h t"], key_position: Int[Array, "b #h c"]
) -> Float[Array, "b h g t c"] | None:
    """Linear distance biases (Press et al., 2022) with the slopes of MPT; None for other models."""
    slopes = head_slopes(config)
    if slopes is None:
        return None
    distance = key_position[:, :, None, None, :] - query_position[:, :, None, :, None]
    return slopes[..., None, None] * distance


def head_slopes(config: ModelConfig) -> Float[Array, "h g"] | None:
    """The slopes of a model's query heads, by the KV head that they share; None for models without ALiBi."""
    if config.position != "alibi":
        return None
    return jnp.asarray(alibi_slopes(config.heads)).reshape(config.kv_heads, config.groups)


__all__ = [
    "QUERY_BLOCK",
    "SLOT_BLOCK",
    "alibi_bias",
    "attend",
    "attend_prompt",
    "causal_mask",
    "head_slopes",
    "join_queries",
    "merge",
    "near_sums",
    "query_block",
    "share_of_evicted",
    "split_queries",
]
