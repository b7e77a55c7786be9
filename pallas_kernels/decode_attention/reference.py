"""Decode attention in XLA: attention of one query, over arrays or codes, and scores from its probabilities."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import noise
from pallas_kernels.attention import (
    SLOT_BLOCK,
    AttentionSpec,
    Partial,
    attend,
    attend_blocks,
    noisy_numerators,
    pad_to,
    slot_block,
    wide,
)
from pallas_kernels.decode_attention.api import DecodeAttention, Decoded, ScoreNoise, Sinks
from pallas_kernels.op import Options
from pallas_kernels.operands import Encoded, LazyRope, Operand, Quantised, cut
from pallas_kernels.quantised import query_products, weighted_values

PACKED_BYTES = 4 << 20
"""Maximum bytes of value codes that a product on CPU repacks together."""


def decode_attention(x: DecodeAttention, options: Options) -> Decoded:
    (q, k, v), position, query_position, platform = (x.q, x.k, x.values), x.position, x.query_position, options.platform
    mask = x.spec.mask(query_position[:, None], position)
    slope_position = position if x.sinks is None else x.sinks.slope_positions(position)
    query_place, key_place = (query_position[:, None], slope_position) if x.places is None else x.places
    bias = x.spec.bias(query_place[:, :, None], key_place)
    replacements = None if x.sinks is None else products_of_sinks(x.sinks, k, position, platform)
    if isinstance(k, Quantised | Encoded) or isinstance(v, Quantised | Encoded):
        partial, probs = attend_codes(q, k, v, mask, x.spec, bias, replacements, platform)
    else:
        assert not isinstance(v, LazyRope)  # refused before
        keys = k.values(q.dtype) if isinstance(k, LazyRope) else k
        # With one row, XLA on CPU copies bfloat16 keys and values to float32; with two rows it does not.
        g = q.shape[2]
        rows = 2 if platform == "cpu" and q.dtype == jnp.bfloat16 and g == 1 else g

        def repeated(x: Array) -> Array:
            return jnp.broadcast_to(x, (*x.shape[:2], rows, *x.shape[3:]))

        biases, replacements = jax.tree.map(repeated, (bias, replacements))
        partial, probs = attend(repeated(q)[:, :, :, None], keys, v, mask, x.spec, biases, replacements)
        partial, probs = jax.tree.map(lambda y: y[:, :, :g], (partial, probs))
    partial, probs = x.with_evicted(partial), probs[:, :, :, 0]
    if isinstance(x.scores, ScoreNoise):
        scores = increments(probs, position, x.scores)
    else:
        # Sums over two axes: with one of them alone, XLA takes four times as long on a CPU.
        scores = {None: None, "each": probs, "sum": probs[:, :, :, None].sum((2, 3))}[x.scores]
    return Decoded(partial.out[:, :, :, 0], partial.lse[:, :, :, 0], scores)


def products_of_sinks(
    sinks: Sinks, k: Operand, position: Int[Array, "b h c"], platform: str
) -> tuple[Bool[Array, "b h g 1 c"], Float[Array, "b h g 1 c"]]:
    """Return the mask of sinks among the slots, and the products of their keys with their own query."""
    count = min(sinks.count, position.shape[-1])
    sink_products = query_products(sinks.q, cut(k, 0, count, 2), platform)
    is_sink = jnp.broadcast_to((position[:, :, :count] < sinks.count)[:, :, None], sink_products.shape)

    def among(x: Array) -> Array:
        return pad_to(x, 3, position.shape[-1])[:, :, :, None]

    return among(is_sink), among(sink_products)


def attend_codes(
    q: Float[Array, "b h g d"],
    k: Operand,
    v: Operand,
    mask: Bool[Array, "b #h 1 c"],
    spec: AttentionSpec,
    bias: Float[Array, "b h g 1 c"] | None,
    replacements: tuple[Bool[Array, "b h g 1 c"], Float[Array, "b h g 1 c"]] | None,
    platform: str,
) -> tuple[Partial, Float[Array, "b h g 1 c"]]:
    """Run `attention.attend` for one query over keys or values that are encoded, without a decoded copy of them."""
    (b, h, g, _), c, e = q.shape, *v.shape[2:]
    s = slot_block(c, 16, 4 * SLOT_BLOCK)
    n = c // s

    def blocks(x: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.reshape(b, leaf.shape[1], n, s, *leaf.shape[3:]), x)

    def at_once(operand: Operand, packed_anew: bool) -> int:
        # Blocks that may be copied together: to decode or unpack them for a product, or to repack them on a CPU.
        if not isinstance(operand, Quantised | Encoded):
            return n
        if wide(q.dtype) == jnp.float64:
            return 1
        if isinstance(operand, Encoded) or operand.bits == 4:
            # A CPU is fastest block by block, other platforms with few steps.
            limit = 1 if platform == "cpu" else max(1, n // 8)
        else:
            limit = max(1, PACKED_BYTES // (b * h * s * e)) if packed_anew and platform == "cpu" else n
        return max(m for m in range(1, n + 1) if n % m == 0 and m <= limit)

    k, v = blocks(k.values(q.dtype) if isinstance(k, LazyRope) else k), blocks(v)
    together = at_once(k, packed_anew=False)

    def logits_of(i: Int[Array, ""]) -> Float[Array, "b h m g s"]:
        return query_products(q[:, :, None], cut(k, i * together, together, 2), platform)

    logits = jax.lax.map(logits_of, jnp.arange(n // together)) if together < n else logits_of(jnp.int32(0))[None]
    logits = jnp.moveaxis(logits, 0, 2).reshape(b, h, n, g, 1, s)

    def weigh(weights: Float[Array, "b h n g 1 s"]) -> Float[Array, "b h g 1 e"]:
        together = at_once(v, packed_anew=True)

        def add(i: Int[Array, ""], out: Float[Array, "b h g e"]) -> Float[Array, "b h g e"]:
            block_weights, block_values = (cut(x, i * together, together, 2) for x in (weights[:, :, :, :, 0], v))
            return out + weighted_values(block_weights, block_values, q.dtype, platform).sum(2)  # type: ignore[arg-type]

        out = jnp.zeros((b, h, g, e), weights.dtype)
        return jax.lax.fori_loop(0, n // together, add, out)[:, :, :, None]

    return attend_blocks(logits, weigh, mask, spec, bias, replacements)


def increments(
    probs: Float[Array, "b h g c"], position: Int[Array, "b h c"], score_noise: ScoreNoise
) -> Float[Array, "b h c"]:
    """Return equation 9 of Keyformer, summed over the group."""
    head = score_noise.first
    if head is not None:
        head = head[:, None] + jnp.arange(position.shape[1], dtype=jnp.int32)
    uniform = noise.uniform_at(score_noise.seed, score_noise.layer, position, head=head).astype(probs.dtype)
    zeta = noise.KINDS[score_noise.kind](uniform)[:, :, None]
    shares = noisy_numerators(probs, zeta, score_noise.tau.astype(probs.dtype)[:, None, None, None])
    total = shares.sum(-1)
    return jnp.einsum("bhgc,bhg->bhc", shares, jnp.where(total > 0, 1.0, 0.0) / jnp.where(total > 0, total, 1.0))
