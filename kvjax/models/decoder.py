"""Forward pass of a decoder for every family: embed, loop over blocks, unembed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from kvjax.models.attention import Attention, Mix, Result, Total
from kvjax.models.config import ModelConfig
from kvjax.models.linear import Linear, Norm, normalise
from kvjax.rope import rotate
from kvjax.types import HEADS, SLOTS, LayerConfig
from pallas_kernels.attention import QUERY_BLOCK, attend, join_queries, query_block, split_queries, wide, with_sink


@struct.dataclass
class LayerWeights:
    """Weights of one decoder block.

    `attention_norm` is None if only outputs are normalized, and `mlp_norm` also if attention and MLP share one norm.
    `mixer` and `mlp` are pytrees. The last two are None in models without them.
    """

    attention_norm: Norm | None
    mixer: Attention
    mlp_norm: Norm | None
    mlp: Callable[[Float[Array, "b t width"], ModelConfig], Float[Array, "b t width"]]
    attention_post_norm: Norm | None = None
    mlp_post_norm: Norm | None = None


class RoundedFrom(NamedTuple):
    """Model in floating point whose weights were rounded to 8-bit integers; see `kvjax.models.fingerprint`."""

    shape: str
    fingerprint: str


@struct.dataclass
class Weights:
    """All weights of a model.

    `unembedding` is None if it is tied to the embedding, and `embedding` is None if it is tied to an unembedding of
    8-bit integers. `rounded_from` is None for weights in floating point, or if it is unknown.
    """

    embedding: Float[Array, "vocab width"] | None
    positions: Float[Array, "positions width"] | None
    layers: tuple[LayerWeights, ...]
    norm: Norm
    unembedding: Linear | None
    rounded_from: RoundedFrom | None = struct.field(pytree_node=False, default=None)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of hidden states."""
        return self.norm.scale.dtype

    @property
    def table(self) -> Linear:
        """The embedding as a linear map."""
        if self.embedding is not None:
            return Linear(self.embedding)
        assert self.unembedding is not None
        return self.unembedding


def embed(
    weights: Weights, config: ModelConfig, tokens: Int[Array, "b t"], positions: Int[Array, "b t"]
) -> Float[Array, "b t width"]:
    """Compute token embeddings, scaled if the model scales them, plus learned position embeddings if it has them."""
    x = _rows(weights.table, tokens, config).astype(weights.dtype)
    if config.embedding_scale is not None:
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
    if weights.positions is not None:
        x = x + weights.positions[jnp.maximum(positions, 0) + config.position_offset]
    return x


def _rows(table: Linear, tokens: Int[Array, "b t"], config: ModelConfig) -> Array:
    if not config.spread.vocab:
        return table.rows(tokens)
    # Each device looks up the tokens of its shard of the table; each token is in one shard.
    here = tokens - jax.lax.axis_index((HEADS, SLOTS)) * len(table.weight)
    found = (here >= 0) & (here < len(table.weight))
    return config.spread.over_devices(jnp.where(found[..., None], table.rows(jnp.where(found, here, 0)), 0))


def block(
    layer: LayerWeights,
    config: ModelConfig,
    shape: LayerConfig,
    x: Float[Array, "b t width"],
    positions: Int[Array, "b t"],
    mix: Mix[Result],
    total: Total[Result] | None = None,
) -> tuple[Float[Array, "b t width"], Result]:
    """Run tokens through a layer: its mixer and its MLP, with norms and residual connections.

    Args:
        x: hidden states before the layer.
        positions: in the row's text; -1 marks padding.
        mix: attention of the layer's queries, keys and values, see `Mix`.
        total: sum over devices, see `Attention`.

    Returns:
        Hidden states after the layer, and the pytree that `mix` returned.
    """
    normed = x if layer.attention_norm is None else normalise(layer.attention_norm, x, config)
    mixed, result = layer.mixer(normed, config, shape, positions, mix, total)
    if layer.attention_post_norm is not None:
        mixed = normalise(layer.attention_post_norm, mixed, config)

    def scaled(out: Float[Array, "b t width"]) -> Float[Array, "b t width"]:
        return out if config.residual_scale is None else out * config.residual_scale

    if config.parallel:
        mlp_input = normed if layer.mlp_norm is None else normalise(layer.mlp_norm, x, config)
        return x + scaled(mixed) + scaled(layer.mlp(mlp_input, config)), result
    x = x + scaled(mixed)
    y = layer.mlp(x if layer.mlp_norm is None else normalise(layer.mlp_norm, x, config), config)
    return x + scaled(y if layer.mlp_post_norm is None else normalise(layer.mlp_post_norm, y, config)), result


def unembed(weights: Weights, config: ModelConfig, x: Float[Array, "*b width"]) -> Float[Array, "*b vocab"]:
    """Apply the final norm and compute logits in at least float32, scaled and soft-capped if the model does so."""
    x = normalise(weights.norm, x, config)
    unembedding = weights.table if weights.unembedding is None else weights.unembedding
    logits = unembedding.product(x, wide(x.dtype))
    if unembedding.bias is not None:
        logits = logits + unembedding.bias
    if config.logit_scale is not None:
        logits = logits * config.logit_scale
    cap = config.logit_soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def forward(
    weights: Weights, config: ModelConfig, tokens: Int[Array, "b t"], lengths: Int[Array, " b"]
) -> Float[Array, "b t vocab"]:
    """Compute logits at every position with full causal attention and no cache, the reference for every policy.

    Args:
        tokens: ids [b, t], padded on the right; the ids of padding are ignored.
        lengths: number of real tokens in each row [b]; logits of padding are meaningless but finite.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    # The causal mask hides padding from real tokens, but ids outside the table would still give NaN.
    tokens = jnp.where(positions < lengths[:, None], tokens, 0)
    x = embed(weights, config, tokens, positions)
    for layer, shape in zip(weights.layers, config.layer_configs, strict=True):
        mix = functools.partial(_causal, shape, layer.mixer.sinks(shape), positions, lengths)
        x, _ = block(layer, config, shape, x, positions, mix)
    return unembed(weights, config, x)


def _causal(
    shape: LayerConfig,
    sink_logits: Float[Array, "h g"] | None,
    positions: Int[Array, "b t"],
    lengths: Int[Array, " b"],
    q: Float[Array, "b h g t d"],
    k: Float[Array, "b h t d"],
    v: Float[Array, "b h t e"],
) -> tuple[Float[Array, "b h g t e"], None]:
    """Compute causal attention in blocks of queries, which avoids an n x n matrix."""
    q = rotate(shape.rope, q, positions[:, None, None], lengths)
    k = rotate(shape.rope, k, positions[:, None], lengths)
    spec, key_positions = shape.spec, positions[:, None]

    def attend_block(queries: tuple[Array, Int[Array, "b t"]]) -> Float[Array, "b h g t e"]:
        q, at = queries
        bias = spec.bias(at[:, None], key_positions)
        of_tokens, _ = attend(q, k, v, spec.mask(at, key_positions), spec, bias)
        return with_sink(of_tokens, sink_logits).out.astype(q.dtype)

    rows, t = positions.shape
    size = query_block(QUERY_BLOCK, rows)
    if t <= size:
        return attend_block((q, positions)), None
    padding = -t % size
    q = jnp.pad(q, [(0, 0)] * 3 + [(0, padding), (0, 0)])
    at = jnp.pad(positions, [(0, 0), (0, padding)])
    blocks = jax.lax.map(attend_block, (split_queries(q, -2, size), split_queries(at, -1, size)))
    return join_queries(blocks, -2)[..., :t, :], None
