"""Attention over slots and over prompts, in parts that merge."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.models.config import ModelConfig
from kvjax.types import Partial, Weighing, wide
from pallas_kernels.prefill_scores import prefill_scores

if TYPE_CHECKING:
    from pallas_kernels.decode_attention import LowRank

SLOT_BLOCK = 64
"""Slots of one flash-decoding split; a capacity beyond one block is a multiple of it."""

QUERY_BLOCK = 256
"""Queries of a prompt that attend at once, at most."""


def attend(
    q: Float[Array, "b h g t d"],
    k: Float[Array, "b h c d"],
    v: Float[Array, "b h c d"],
    mask: Bool[Array, "b #h t c"],
    bias: Float[Array, "b h g t c"] | None = None,
) -> tuple[Partial, Float[Array, "b h g t c"]]:
    """Softmax attention with its log-sum-exp and, for those who ask, its probabilities.

    Args:
        q: queries; the g query heads of a group share one KV head.
        k: keys.
        v: values.
        mask: True where a query may see a key; a query that sees none returns zeros.
        bias: added to the logits (ALiBi), or None.

    Returns:
        The unmerged attention, and the probabilities (free when they are not used).
    """
    b, h, g, t, d = q.shape
    c = k.shape[-2]
    # A decode step reads the slots in blocks: XLA runs them side by side on every core.
    n = c // SLOT_BLOCK if t == 1 and c % SLOT_BLOCK == 0 else 1
    blocks_k, blocks_v = k.reshape(b, h, n, c // n, d), v.reshape(b, h, n, c // n, d)
    float_type = wide(q.dtype)
    logits = jnp.einsum("bhgtd,bhnsd->bhngts", q, blocks_k, preferred_element_type=float_type) / math.sqrt(d)
    if bias is not None:
        logits += jnp.moveaxis(bias.reshape(b, h, g, t, n, c // n), -2, 2)
    visible = jnp.moveaxis(mask.reshape(b, mask.shape[1], 1, t, n, c // n), -2, 2)
    lowest = jnp.finfo(float_type).min
    logits = jnp.where(visible, logits, lowest)
    highest = jnp.maximum(logits.max((2, 5), keepdims=True), lowest / 2)
    weights = jnp.exp(logits - highest)
    total = weights.sum((2, 5), keepdims=True)
    safe_total = jnp.maximum(total, jnp.finfo(float_type).tiny)
    out = jnp.einsum("bhngts,bhnsd->bhngtd", weights.astype(v.dtype), blocks_v, preferred_element_type=float_type)
    out = out.sum(2) / safe_total[:, :, 0]
    lse = jnp.where(total > 0, highest + jnp.log(safe_total), -jnp.inf)[:, :, 0, :, :, 0]
    probs = jnp.moveaxis(weights / safe_total, 2, -2).reshape(b, h, g, t, c)
    return Partial(out, lse), probs


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
        logits = jnp.einsum("bhgtd,bhtd->bhgt", q, k, preferred_element_type=kind) / math.sqrt(d)
        return jnp.where(position[:, None, None] >= 0, jnp.exp(logits - lse), 0.0).sum(2)
    size = query_block(t, b)
    span = min(t, -(-most // size) * size + size)

    def add(sums, queries):
        q, lse, at, width, first = queries
        start = jnp.maximum(first + size - span, 0)
        keys = jax.lax.dynamic_slice_in_dim(k, start, span, axis=2)
        where = jax.lax.dynamic_slice_in_dim(position, start, span, axis=1)
        logits = jnp.einsum("bhgtd,bhsd->bhgts", q, keys, preferred_element_type=kind) / math.sqrt(d)
        bias = alibi_bias(config, at[:, None], where[:, None])
        logits = logits if bias is None else logits + bias
        seen = causal_mask(at, where[:, None], config.sliding_window)
        seen &= (at[:, :, None] - where[:, None] < width[..., None])[:, None]
        added = jnp.where(seen[:, :, None], jnp.exp(logits - lse[..., None]), 0.0).sum((2, 3))
        added += jax.lax.dynamic_slice_in_dim(sums, start, span, axis=2)
        return jax.lax.dynamic_update_slice_in_dim(sums, added, start, axis=2), None

    blocks = [split_queries(x, axis, size) for x, axis in ((q, -2), (lse, -1), (position, -1), (width, -1))]
    return jax.lax.scan(add, jnp.zeros((b, h, t), kind), (*blocks, jnp.arange(0, t, size)))[0]


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the union of two parts, exact and stable; a part that saw nothing has lse = -inf."""
    highest = jnp.maximum(a.lse, b.lse)
    finite = jnp.where(jnp.isfinite(highest), highest, 0.0)
    share_a, share_b = jnp.exp(a.lse - finite), jnp.exp(b.lse - finite)
    total = share_a + share_b
    safe_total = jnp.maximum(total, jnp.finfo(total.dtype).tiny)
    out = (share_a / safe_total)[..., None] * a.out + (share_b / safe_total)[..., None] * b.out
    return Partial(out, jnp.where(total > 0, finite + jnp.log(safe_total), -jnp.inf))


def share_of_evicted(memory: LowRank) -> Partial:
    """Attention over what LESS remembers (equation 3): phi H / phi z, of mass phi z; nothing where that is 0."""
    phi, h, z = memory
    mass = jnp.einsum("bhgtr,bhr->bhgt", phi, z)
    nothing = mass <= 0
    mass = jnp.where(nothing, 1.0, mass)
    out = jnp.einsum("bhgtr,bhrd->bhgtd", phi, h) / mass[..., None]
    return Partial(jnp.where(nothing[..., None], 0.0, out), jnp.where(nothing, -jnp.inf, jnp.log(mass)))


def causal_mask(
    query_position: Int[Array, "b t"], key_position: Int[Array, "b #h c"], window: int | None
) -> Bool[Array, "b #h t c"]:
    """Which live keys (position >= 0) are not after a query, nor before the model's sliding window."""
    queries, keys = query_position[:, None, :, None], key_position[:, :, None, :]
    visible = (keys >= 0) & (keys <= queries)
    return visible if window is None else visible & (keys > queries - window)


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
    return alibi_slopes(config.heads).reshape(config.kv_heads, config.groups)


def alibi_slopes(heads: int) -> Float[Array, " heads"]:
    """Geometric slopes 2^(-8i/n) for the next power of two n, odd ones first when heads is not a power of two."""
    power = 2 ** math.ceil(math.log2(heads))
    slopes = 2.0 ** (-8.0 * jnp.arange(1, power + 1) / power)
    return slopes if power == heads else jnp.concatenate([slopes[1::2], slopes[0::2]])[:heads]


def query_block(tokens: int, rows: int) -> int:
    """Queries that attend at once, so that a block's probabilities stay linear in the prompt."""
    most = max(16, QUERY_BLOCK // max(1, rows // 4))
    return math.gcd(tokens, 1 << (most.bit_length() - 1))  # a power of two, or 12 rows would share no factor with 1024


def split_queries(x: Array, axis: int, block: int) -> Array:
    """Queries in blocks along a new leading axis, for `jax.lax.scan`."""
    axis %= x.ndim
    blocks = x.reshape(*x.shape[:axis], x.shape[axis] // block, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(blocks, axis, 0)


def join_queries(blocks: Array, axis: int) -> Array:
    """The inverse of `split_queries`; `axis` counts in the joined array."""
    axis %= blocks.ndim - 1
    moved = jnp.moveaxis(blocks, 0, axis)
    return moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])


__all__ = [
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
