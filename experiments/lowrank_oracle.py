"""Rank of the attention residual (Figure 3): the best approximation of any rank, which no cache can compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.layer import LayerCache, MixerInput
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Weights, block, embed, layers_of, unembed
from kvjax.rope import rotate
from kvjax.types import LayerConfig, TokenBatch, setting
from pallas_kernels.attention import attend


class Split(NamedTuple):
    """Attention outputs of whole texts, split into the part of a sparse policy and the rest."""

    full: Float[Array, "b h g t d"]
    sparse: Float[Array, "b h g t d"]
    """Output renormalised over the kept tokens, as under an eviction policy."""

    @property
    def residual(self) -> Float[Array, "b h g t d"]:
        """Return the part that the sparse policy lacks (section 1)."""
        return self.full - self.sparse


def top_k(
    q: Float[Array, "b h g t d"],
    k: Float[Array, "b h t d"],
    v: Float[Array, "b h t d"],
    position: Int[Array, "b t"],
    keep: int,
    config: LayerConfig,
) -> Split:
    """Split attention into the `keep` keys with the highest attention per query and the rest; n x n memory.

    Args:
        q, k: rotated queries and keys.
        v: values.
        position: positions of the tokens, -1 for padding.
        keep: keys per query, from 1; the top-512 policy of Figure 3.
        config: config of the layer.
    """
    spec, everyone = config.spec, position[:, None]
    mask = spec.mask(position, everyone)
    full, probs = attend(q, k, v, mask, spec, spec.bias(everyone, everyone))
    n = k.shape[2]
    if keep >= n:
        return Split(full.out, full.out)
    # The keep-th largest probability of each query is the threshold; all equal values are kept.
    threshold = jax.lax.top_k(probs, keep)[0][..., -1:]
    kept = jnp.where((probs >= threshold) & mask[:, :, None], probs, 0.0)
    total = jnp.maximum(kept.sum(-1, keepdims=True), jnp.finfo(kept.dtype).tiny)
    return Split(full.out, jnp.einsum("bhgts,bhsd->bhgtd", kept / total, v.astype(kept.dtype)))


def singular_values(matrix: Float[Array, "*b t d"]) -> Float[Array, "*b r"]:
    """Return singular values relative to the largest (left half of Figure 3)."""
    values = jnp.linalg.svd(matrix, compute_uv=False)
    return values / jnp.maximum(values[..., :1], jnp.finfo(values.dtype).tiny)


def best_rank(matrix: Float[Array, "*b t d"], rank: int) -> Float[Array, "*b t d"]:
    """Return the nearest matrix of a rank, from 0, in the Frobenius norm (Eckart and Young)."""
    # Project on the leading right singular vectors, from d x d products: a hundred times as fast as a decomposition.
    vectors = jnp.linalg.eigh(jnp.einsum("...td,...te->...de", matrix, matrix))[1]
    leading = vectors[..., vectors.shape[-1] - rank :] if rank < vectors.shape[-1] else vectors
    return jnp.einsum("...td,...dr,...er->...te", matrix, leading, leading)


Attention = Callable[[Array, Array, Array, Array, LayerConfig], Array]
"""Function of rotated queries [b h g t d] and keys [b h t d], values [b h t e], positions [b t] and the layer."""


def read(
    weights: Weights, config: ModelConfig, tokens: Int[Array, "b t"], attention: Attention
) -> Float[Array, "b t width"]:
    """Return the final hidden states of whole texts, with a custom attention in every layer.

    Args:
        weights: the model's.
        config: the model's shape.
        tokens: ids, without padding.
        attention: called once for each layer, from the first to the last.
    """
    reading = TokenBatch.of_text(tokens, jnp.full(len(tokens), tokens.shape[1]))
    x = embed(weights, config, tokens, reading.position)
    for layer in layers_of(weights, config):
        x, _ = block(layer, _Custom(attention=attention), reading, x)
    return x


class _Custom(LayerCache):
    """Custom attention of whole texts, which stores nothing."""

    attention: Attention = setting(None)

    def attend(
        self, tokens: MixerInput, q: Array, k: Array, v: Array, sink_logits: Array | None
    ) -> tuple[Array, _Custom]:
        shape, position, length = tokens.shape, tokens.reading.position, tokens.reading.rope_length
        q = rotate(shape.rope, q, position[:, None, None], length)
        k = rotate(shape.rope, k, position[:, None], length)
        return self.attention(q, k, v, position, shape), self


def logits(
    weights: Weights, config: ModelConfig, tokens: Int[Array, "b t"], *, keep: int, rank: int = 0
) -> Float[Array, "b t vocab"]:
    """Return next-token logits with top-k attention plus a rank-r residual in every layer (Figure 3, right).

    One approximation covers a whole text's residual, so early tokens depend a little on later ones. It is a bound on
    the quality that a memory of r features could recover, and not a policy.

    Args:
        weights: the model's.
        config: the model's shape.
        tokens: ids [b, t], without padding.
        keep: keys per query, from 1.
        rank: rank of the added residual per head, from 0; the paper finds 4 to be enough.

    Raises:
        ValueError: keep or rank are out of range.
    """
    if keep < 1 or rank < 0:
        raise ValueError(f"keep={keep} and rank={rank} are not at least 1 and 0.")

    def attention(q: Array, k: Array, v: Array, position: Array, shape: LayerConfig) -> Array:
        split = top_k(q, k, v, position, keep, shape)
        return split.sparse + best_rank(split.residual, rank) if rank else split.sparse

    return unembed(weights, config, read(weights, config, tokens, attention))
