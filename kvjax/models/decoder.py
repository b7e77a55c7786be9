"""Forward pass of a decoder for every family: embed, loop over blocks, unembed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.models.config import ModelConfig
from kvjax.models.integers import Codes, signed
from kvjax.models.matmul import BLOCK, in_blocks, product, product_with_codes
from kvjax.rope import rotate
from kvjax.types import HEADS, SLOTS, LayerConfig
from pallas_kernels.attention import QUERY_BLOCK, attend, join_queries, query_block, split_queries, wide, with_sink

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}
"""Activation functions of MLPs, by their names in a config."""


@struct.dataclass
class Linear:
    """Linear map in the layout of checkpoints: weight [out, in], bias [out] or None.

    A weight of 8-bit integers, signed or unsigned, has a scale [out] in float32 that multiplies the product.
    """

    weight: Float[Array, "out in"] | Codes
    bias: Float[Array, " out"] | None = None
    scale: Float[Array, " out"] | None = None

    def __call__(self, x: Float[Array, "*b in"]) -> Float[Array, "*b out"]:
        y = self.product(x, x.dtype) if self.scale is not None else product(x, self.weight)
        return y if self.bias is None else y + self.bias

    def over(
        self, total: Callable[[Float[Array, "*b out"]], Float[Array, "*b out"]], x: Float[Array, "*b in"]
    ) -> Float[Array, "*b out"]:
        """Apply the map to this device's shard of the inputs; `total` sums over devices."""
        y = total(dataclasses.replace(self, bias=None)(x))
        return y if self.bias is None else y + self.bias

    def product(self, x: Float[Array, "*b in"], dtype: DTypeLike) -> Float[Array, "*b out"]:
        """Apply the map without its bias and return the result in `dtype`."""
        if self.scale is not None:
            return product_with_codes(x, self.weight, self.scale, dtype)
        return product(x, self.weight.astype(x.dtype), jnp.promote_types(dtype, wide(x.dtype))).astype(dtype)

    def rows(self, outputs: Int[Array, "*b"]) -> Float[Array, "*b in"]:
        """Return rows of the weight in floating point."""
        rows = signed(self.weight[outputs])
        return rows if self.scale is None else rows * self.scale[outputs][..., None]

    @property
    def matrix(self) -> Float[Array, "out in"]:
        """Weight in floating point."""
        return self.weight if self.scale is None else signed(self.weight) * self.scale[..., None]


@struct.dataclass
class Norm:
    """Scale and, for layer normalization, offset; both [width]."""

    scale: Float[Array, " width"]
    bias: Float[Array, " width"] | None = None


@struct.dataclass
class DenseMlp:
    """MLP that every token runs through; `gate` is None if it has no gate."""

    gate: Linear | None
    up: Linear
    down: Linear

    def __call__(self, x: Float[Array, "b t width"], config: ModelConfig) -> Float[Array, "b t width"]:
        if config.spread.mlp:
            return self.down.over(config.spread.over_devices, self.inner(x, config))
        return self.in_blocks(x, config)

    def in_blocks(self, x: Float[Array, "*b width"], config: ModelConfig) -> Float[Array, "*b width"]:
        """Apply the MLP to one block of rows after the other, with the weights that are here."""
        # 8-bit weights multiply two digits of each number.
        block = BLOCK if self.up.scale is None else BLOCK // 2
        return in_blocks(functools.partial(self.whole, config=config), x, block)

    def whole(self, x: Float[Array, "*b width"], config: ModelConfig) -> Float[Array, "*b width"]:
        """Apply the MLP to all rows at once, with the weights that are here."""
        return self.down(self.inner(x, config))

    def inner(self, x: Float[Array, "*b width"], config: ModelConfig) -> Float[Array, "*b inner"]:
        """Return the activations between the two products."""
        activation = ACTIVATIONS[config.activation]
        if self.gate is None:
            return activation(self.up(x))
        gate, up = self.gate(x), self.up(x)
        if config.clamped_swiglu is None:
            return activation(gate) * up
        slope, limit = config.clamped_swiglu
        gate = jnp.minimum(gate, limit)
        return gate * jax.nn.sigmoid(slope * gate) * (jnp.clip(up, -limit, limit) + 1)


@struct.dataclass
class LayerWeights:
    """Weights of one decoder block.

    `attention_norm` is None if only outputs are normalized, and `mlp_norm` also if attention and MLP share one norm.
    `mlp` is a pytree.
    The last five are None in models without them.
    """

    attention_norm: Norm | None
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    mlp_norm: Norm | None
    mlp: Callable[[Float[Array, "b t width"], ModelConfig], Float[Array, "b t width"]]
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    attention_post_norm: Norm | None = None
    mlp_post_norm: Norm | None = None
    sink_logits: Float[Array, " heads"] | None = None


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


def normalise(norm: Norm | None, x: Float[Array, "*b width"], config: ModelConfig) -> Float[Array, "*b width"]:
    """Apply RMS or layer normalization, computed in at least float32; `norm` is None for neither scale nor offset."""
    precise = x.astype(wide(x.dtype))
    if config.norm == "layer":
        precise = precise - precise.mean(-1, keepdims=True)
    precise = precise * jax.lax.rsqrt(jnp.mean(precise**2, -1, keepdims=True) + config.norm_eps)
    if norm is None:
        return precise.astype(x.dtype)
    if config.norm_offset:
        return (precise * (1 + norm.scale.astype(precise.dtype))).astype(x.dtype)
    y = precise.astype(x.dtype) * norm.scale
    return y if norm.bias is None else y + norm.bias


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


class Projected(NamedTuple):
    """A block's input, normalized unless only outputs are, and its queries, keys and values before RoPE."""

    normed: Float[Array, "b t width"]
    q: Float[Array, "b h g t d"]
    k: Float[Array, "b h t d"]
    v: Float[Array, "b h t e"]


def project(
    layer: LayerWeights,
    config: ModelConfig,
    shape: LayerConfig,
    x: Float[Array, "b t width"],
    positions: Int[Array, "b t"],
) -> Projected:
    """Run a block up to its attention; a position of -1 marks padding.

    Query head i uses KV head i // g: the heads of one group are adjacent.
    """
    b, t, _ = x.shape
    normed = x if layer.attention_norm is None else normalise(layer.attention_norm, x, config)
    q, k, v = layer.query(normed), layer.key(normed), layer.value(normed)
    if config.query_key_norm_over == "heads":
        q, k = _normalise_heads(layer, config, q, k)
    q = q.reshape(b, t, shape.kv_heads, shape.groups, shape.key_width)
    k = k.reshape(b, t, shape.kv_heads, shape.key_width)
    v = v.reshape(b, t, shape.kv_heads, shape.value_width)
    if shape.normed and config.query_key_norm_over == "head":
        q, k = normalise(layer.query_norm, q, config), normalise(layer.key_norm, k, config)
    if config.qkv_clip is not None:
        q, k, v = (jnp.clip(x, -config.qkv_clip, config.qkv_clip) for x in (q, k, v))
    growth = config.query_growth
    if growth is not None and not (growth.unrotated and shape.rope is not None):
        stretch = (jnp.maximum(positions, 0) + growth.offset) // growth.length
        q = q * (1 + growth.slope * jnp.log1p(stretch.astype(wide(q.dtype))))[:, :, None, None, None].astype(q.dtype)
    return Projected(normed, q.transpose(0, 2, 3, 1, 4), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3))


def sink_logits_of(layer: LayerWeights, shape: LayerConfig) -> Float[Array, "h g"] | None:
    """Return the logits of a layer's sinks by KV head; None for a layer without sinks."""
    return None if layer.sink_logits is None else layer.sink_logits.reshape(shape.kv_heads, shape.groups)


def _normalise_heads(
    layer: LayerWeights, config: ModelConfig, q: Float[Array, "b t f"], k: Float[Array, "b t f"]
) -> tuple[Float[Array, "b t f"], Float[Array, "b t f"]]:
    """Apply RMS normalization to queries and to keys over all heads; one sum over devices serves both."""
    assert layer.query_norm is not None and layer.key_norm is not None
    pairs = [(q, layer.query_norm), (k, layer.key_norm)]
    squares = jnp.stack([jnp.mean(x.astype(wide(x.dtype)) ** 2, -1) for x, _ in pairs])
    means = config.spread.over_heads(squares) / config.spread.heads
    factors = jax.lax.rsqrt(means + config.norm_eps)[..., None]
    q, k = ((x * factor).astype(x.dtype) * norm.scale for (x, norm), factor in zip(pairs, factors, strict=True))
    return q, k


def finish_block(
    layer: LayerWeights,
    config: ModelConfig,
    shape: LayerConfig,
    x: Float[Array, "b t width"],
    normed: Float[Array, "b t width"],
    attended: Float[Array, "b h g t e"],
    total: Callable[[Float[Array, "b t width"]], Float[Array, "b t width"]] | None = None,
) -> Float[Array, "b t width"]:
    """Run a block of input `x` from its attention on.

    `total` sums the output projections of all devices; None stands for `over_attention` of the layer's `spread`.
    """
    b, t, _ = x.shape
    attended = attended.astype(x.dtype).transpose(0, 3, 1, 2, 4).reshape(b, t, shape.heads * shape.value_width)
    attended = layer.output.over(total or shape.spread.over_attention, shape.spread.own_features(attended))
    if layer.attention_post_norm is not None:
        attended = normalise(layer.attention_post_norm, attended, config)

    def scaled(out: Float[Array, "b t width"]) -> Float[Array, "b t width"]:
        return out if config.residual_scale is None else out * config.residual_scale

    if config.parallel:
        mlp_input = normed if layer.mlp_norm is None else normalise(layer.mlp_norm, x, config)
        return x + scaled(attended) + scaled(layer.mlp(mlp_input, config))
    x = x + scaled(attended)
    fed = layer.mlp(x if layer.mlp_norm is None else normalise(layer.mlp_norm, x, config), config)
    return x + scaled(fed if layer.mlp_post_norm is None else normalise(layer.mlp_post_norm, fed, config))


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
        normed, q, k, v = project(layer, config, shape, x, positions)
        attended = _causal(shape, sink_logits_of(layer, shape), positions, lengths, q, k, v)
        x = finish_block(layer, config, shape, x, normed, attended)
    return unembed(weights, config, x)


def _causal(
    shape: LayerConfig,
    sink_logits: Float[Array, "h g"] | None,
    positions: Int[Array, "b t"],
    lengths: Int[Array, " b"],
    q: Float[Array, "b h g t d"],
    k: Float[Array, "b h t d"],
    v: Float[Array, "b h t e"],
) -> Float[Array, "b h g t e"]:
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
        return attend_block((q, positions))
    padding = -t % size
    q = jnp.pad(q, [(0, 0)] * 3 + [(0, padding), (0, 0)])
    at = jnp.pad(positions, [(0, 0), (0, padding)])
    blocks = jax.lax.map(attend_block, (split_queries(q, -2, size), split_queries(at, -1, size)))
    return join_queries(blocks, -2)[..., :t, :]
