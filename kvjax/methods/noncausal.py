"""Non-causal attention (Compactor, Chari and Van Durme 2025) of a chunk's queries to all of its keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from kvjax.methods.leverage import TextScore
from kvjax.methods.register import register_score
from kvjax.policies.rankings import standardized
from kvjax.types import New, View, check, setting, wide


@register_score("noncausal", paper="Compactor, 2025", group="ranked once for each prompt or turn", recent=32)
@struct.dataclass
class NonCausal(TextScore):
    r"""Attention of all queries of a chunk, times the norm of the value, pooled over neighbors.

    .. math:: F(i) = z(\mathrm{pool}_{|j - i| \le 1} \, \lVert v_j \rVert \, \frac 1 G \sum_g \sum_{t \in p} a_{gt}(j))

    with the softmax over the keys of a chunk p, before and after the query.

    When: to study one half of `compactor` alone. It has not been measured on many models yet. Generated tokens are
    evicted first, except the newest `recent` ones.

    Args:
        chunk: tokens of a chunk.
    """

    chunk: int = setting(256)

    def __post_init__(self) -> None:
        check(self.chunk >= 1, "chunk", self.chunk, "a number of tokens from 1")

    def _of_text(self, view: View, new: New, counts: Bool[Array, "b h t"]) -> Float[Array, "b h t"]:
        return noncausal_attention(new, counts, self.sinks, self.chunk)


def noncausal_attention(new: New, counts: Bool[Array, "b h t"], sinks: int, size: int) -> Float[Array, "b h t"]:
    """Return z-scores of the attention within chunks of `size` tokens; the first chunk begins after the sinks.

    Args:
        counts: mask of the tokens that attend and are attended to.
    """
    kind, tokens = wide(new.k.dtype), counts.shape[-1]
    chunks = -(-tokens // size)
    first = jnp.clip(sinks - new.position[:, :1], 0, tokens)
    at = first + jnp.arange(chunks * size)
    inside, at = at < tokens, jnp.minimum(at, tokens - 1)

    def chunked(x: Float[Array, "b *h t d"]) -> Float[Array, "p b *h l d"]:
        x = jnp.take_along_axis(x, at.reshape(len(at), *(1,) * (x.ndim - 3), -1, 1), axis=-2)
        return jnp.moveaxis(x.reshape(*x.shape[:-2], chunks, size, x.shape[-1]), -3, 0)

    def attention(operands: tuple[Array, Array, Array]) -> Float[Array, "b h l"]:
        q, k, real = operands
        logits = new.config.scale * jnp.einsum("bhgqd,bhkd->bhgqk", q.astype(kind), k.astype(kind))
        shares = jax.nn.softmax(jnp.where(real[:, :, None, None, :, 0], logits, -jnp.inf), axis=-1)
        return jnp.where(real[:, :, None], shares, 0.0).sum(3).mean(2)

    real = chunked(counts[..., None]) & jnp.moveaxis(inside.reshape(-1, 1, chunks, size, 1), 2, 0)
    summed = jnp.moveaxis(jax.lax.map(attention, (chunked(new.q), chunked(new.k), real)), 0, 2)
    back = jnp.maximum(jnp.arange(tokens) - first, 0)
    summed = jnp.take_along_axis(summed.reshape(*counts.shape[:2], -1), back[:, None], axis=2)
    paid = jnp.where(counts, summed * jnp.linalg.norm(new.v.astype(kind), axis=-1), 0.0)
    paid = jnp.pad(paid, ((0, 0), (0, 0), (1, 1)))
    return standardized((paid[..., :-2] + paid[..., 1:-1] + paid[..., 2:]) / 3, counts, new.spread)
