"""Prompt attention that JAX can differentiate: blocks of queries over all keys, recomputed in the backward pass.

The forward forms have loops whose bounds depend on the prompt. JAX cannot differentiate these in reverse mode.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.attention import attend, join_queries, pad_to, split_queries, tempered, wide
from pallas_kernels.common import padded
from pallas_kernels.operands import values
from pallas_kernels.prefill_scores.api import PrefillScores, PromptAttention

LOGITS = 1 << 22
"""Approximate number of logits in a block; all of them exist at one time."""


def prefill_scores(x: PrefillScores) -> PromptAttention:
    (b, h, g, n, _), c, dtype = x.q.shape, x.k.shape[2], wide(x.q.dtype)
    query_position, key_position, noise = x.query_position, x.key_position, x.noise
    keys, vals = (values(y, x.q.dtype) for y in (x.k, x.v))
    query_place, key_place = (query_position[:, None], key_position) if x.places is None else x.places
    counted = (query_position >= 0)[:, None, None].astype(dtype)
    counted = counted if x.weights is None else counted * x.weights.astype(dtype)
    size = max(1, min(n, LOGITS // (b * h * g * c)))

    @jax.checkpoint
    def read(block: tuple[Array, ...]) -> PromptAttention:
        queries, position, place, count = block
        mask, bias = x.spec.mask(position, key_position), x.spec.bias(place, key_place)
        partial, probs = attend(queries, keys, vals, mask, x.spec, bias)
        if not x.scores:
            return PromptAttention(*partial, None)
        if x.tau != 1 or noise is not None:
            probs = tempered(probs, None if noise is None else noise.astype(dtype)[:, :, None, None], x.tau)
            total = probs.sum(-1, keepdims=True)
            probs = probs / jnp.where(total > 0, total, 1)
        count = jnp.broadcast_to(count, (b, h, *count.shape[2:]))
        return PromptAttention(*partial, jnp.einsum("bhmt,bhgts->bhms", count, probs))

    arrays = ((x.q, 3), (query_position, 1), (query_place, 2), (counted, 3))
    blocks = [split_queries(pad_to(y, axis, padded(y.shape[axis], size)), axis, size) for y, axis in arrays]
    # Padding of the last block attends to nothing.
    blocks[1] = jnp.where((jnp.arange(blocks[1].shape[0] * size) < n).reshape(-1, 1, size), blocks[1], -1)
    blocks[3] = jnp.where((blocks[1] >= 0)[:, :, None, None], blocks[3], 0)
    found = jax.lax.map(read, tuple(blocks))
    out, lse = (join_queries(y, 3)[:, :, :, :n] for y in found[:2])
    return PromptAttention(out, lse, found.scores.sum(0) if x.scores else None)
