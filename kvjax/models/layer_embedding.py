"""Embeddings of tokens that one layer adds to its hidden states."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from kvjax.models.config import ModelConfig
from kvjax.models.linear import Linear, Norm, normalise
from kvjax.models.mlp import ACTIVATIONS
from kvjax.types import TokenBatch


@struct.dataclass
class LayerEmbedding:
    """Embedding of tokens in one layer, added to hidden states through a gate that these open (Gemma 3n and 4).

    `table` [vocab p] has a vector for each token, and `context` [p width] makes another of the embedding that the
    model's first layer reads. Their mean is multiplied by the gate from `narrow` [p width]; `widen` [width p] follows.
    """

    table: Linear
    context: Linear
    context_norm: Norm
    narrow: Linear
    widen: Linear
    norm: Norm

    def __call__(
        self, x: Float[Array, "b t width"], reading: TokenBatch, config: ModelConfig
    ) -> Float[Array, "b t width"]:
        """Return what the layer adds to the hidden states `x` of the tokens."""
        gate = ACTIVATIONS[config.activation](self.narrow(x))
        return normalise(self.norm, self.widen(gate * self.of_tokens(reading, config)), config)

    def of_tokens(self, reading: TokenBatch, config: ModelConfig) -> Float[Array, "b t p"]:
        """Return the layer's embeddings of tokens; those of tokens beyond the table are those of token 0."""
        assert reading.embedding is not None and config.layer_embeddings is not None
        first, sizes = reading.embedding, config.layer_embeddings
        context = normalise(
            self.context_norm, self.context(first) * jnp.asarray(config.width**-0.5, first.dtype), config
        )
        token = jnp.where(reading.token < sizes.vocab_size, reading.token, 0)
        vectors = self.table.rows(token).astype(first.dtype) * jnp.asarray(sizes.width**0.5, first.dtype)
        return (context + vectors) * jnp.asarray(2**-0.5, first.dtype)
