"""Weights of a config: their shapes, random values, and 8-bit quantization."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8, PRNGKeyArray, UInt8

from kvjax.models.attention import Attention
from kvjax.models.config import DeltaRule, Latent, LayerEmbeddings, ModelConfig, ShortConvolution
from kvjax.models.decoder import LayerWeights, Weights
from kvjax.models.experts import Experts
from kvjax.models.gated_delta import GatedDelta
from kvjax.models.integers import OFFSET
from kvjax.models.latent import LatentAttention
from kvjax.models.layer_embedding import LayerEmbedding
from kvjax.models.linear import Linear, Norm
from kvjax.models.mlp import DenseMlp, Xielu
from kvjax.models.mlp_and_experts import MlpAndExperts
from kvjax.models.shared_attention import SharedAttention
from kvjax.models.short_conv import ShortConv
from kvjax.models.streams import Laurel, LayerStreams, ModelStreams
from kvjax.types import LayerConfig

_AT_ONCE = 1 << 16
"""Numbers quantized per block, few enough for its float32 copy to stay in a processor's caches."""
_ALIGNMENT = 64
"""Bytes; where an array begins at a multiple of them, JAX takes it over on a CPU without a copy."""


def is_shape(leaf: object) -> bool:
    """Return whether an array is only its shape, as in a model without weights."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def require_weights(weights: Weights, what: str) -> None:
    """Raise a ValueError if weights are only shapes, and `what` reads them."""
    if is_shape(weights.table.weight):
        raise ValueError(f"{what} needs a model's weights, of which there are only shapes here; load the model.")


def weight_shapes(config: ModelConfig, dtype: DTypeLike = jnp.float32) -> Weights:
    """Return the weights of a model as `jax.ShapeDtypeStruct` leaves; leaves that the config does not use are None."""

    def leaf(*shape: int) -> Array:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))  # type: ignore[return-value]

    def linear(*shape: int, bias: bool) -> Linear:
        return Linear(leaf(*shape), leaf(*shape[:-1]) if bias else None)

    def norm(width: int = config.width) -> Norm:
        return Norm(leaf(width) if config.norm_scales else None, leaf(width) if config.norm_bias else None)

    def dense(inner: int, *count: int, sparsity: float = 0.0) -> DenseMlp:
        return DenseMlp(
            sparsity=sparsity,
            gate=linear(*count, inner, config.width, bias=config.mlp_bias) if config.gated_mlp else None,
            up=linear(*count, inner, config.width, bias=config.mlp_bias),
            down=linear(*count, config.width, inner, bias=config.mlp_bias),
            activation=Xielu(leaf(1), leaf(1), leaf(1), leaf(1)) if config.activation == "xielu" else None,
        )

    def mlp(index: int) -> DenseMlp | Experts | MlpAndExperts:
        mixture = config.mixture
        if mixture is None or index in mixture.dense_layers:
            return dense(
                config.widths_of_mlps[index], sparsity=0.0 if config.sparsities is None else config.sparsities[index]
            )
        router_bias = leaf(mixture.count) if mixture.router_bias else None
        shared = None if mixture.shared_width is None else dense(mixture.shared_width)
        experts = Experts(
            router=leaf(mixture.count, config.width),
            experts=dense(mixture.width, mixture.count),
            router_bias=router_bias,
            shared=shared,
            shared_gate=leaf(1, config.width) if mixture.shared_gate else None,
            selection_bias=leaf(mixture.count) if mixture.selection_bias else None,
        )
        if not mixture.beside_mlp:
            return experts
        return MlpAndExperts(
            dense_norm=norm(),
            dense=dense(config.widths_of_mlps[index]),
            dense_post_norm=norm(),
            router_scale=leaf(config.width),
            experts_norm=norm(),
            experts=experts,
            experts_post_norm=norm(),
            expert_scales=leaf(mixture.count),
        )

    def embedding(sizes: LayerEmbeddings) -> LayerEmbedding:
        return LayerEmbedding(
            table=linear(sizes.vocab_size, sizes.width, bias=False),
            context=linear(sizes.width, config.width, bias=False),
            context_norm=norm(sizes.width),
            narrow=linear(sizes.width, config.width, bias=False),
            widen=linear(config.width, sizes.width, bias=False),
            norm=norm(),
        )

    def laurel(rank: int) -> Laurel:
        return Laurel(linear(rank, config.width, bias=False), linear(config.width, rank, bias=False), norm())

    def layer_streams(count: int) -> LayerStreams:
        return LayerStreams(
            router_norm=norm(),
            router=linear(count, config.width, bias=False),
            prediction=linear(count**2, count, bias=False),
            correction=linear(count, count, bias=False),
            scale=leaf(config.width),
        )

    def model_streams(count: int) -> ModelStreams:
        maps = tuple(linear(config.width, config.width, bias=False) for _ in range(count - 1))
        return ModelStreams(expand=maps, merge=maps)

    def attention(index: int, shape: LayerConfig) -> Attention | SharedAttention:
        heads, kv_heads = (shape.heads, shape.kv_heads) if config.query_key_norm_over == "heads" else (1, 1)
        scaled, features = config.query_key_norms and config.query_key_scales, shape.heads * shape.value_width
        query = linear(shape.heads * shape.key_width, config.width, bias=config.qkv_bias)
        output = linear(config.width, features, bias=config.output_bias)
        query_norm = norm(heads * shape.key_width) if scaled else None
        sink_logits = leaf(shape.heads) if config.sinks else None
        gates = {None: None, "feature": features, "head": shape.heads}[config.output_gate]
        if shape.source is not None:
            return SharedAttention(query, output, query_norm, sink_logits)
        values = linear(shape.kv_heads * shape.value_width, config.width, bias=config.qkv_bias)
        return Attention(
            query=query,
            key=linear(shape.kv_heads * shape.key_width, config.width, bias=config.qkv_bias),
            value=None if config.tied_values and config.tied_values[index] else values,
            output=output,
            query_norm=query_norm,
            key_norm=norm(kv_heads * shape.key_width) if scaled else None,
            sink_logits=sink_logits,
            gate=None
            if gates is None
            else linear(gates, config.width, bias=config.output_gate == "feature" and config.qkv_bias),
        )

    def latent_attention(widths: Latent) -> LatentAttention:
        queries, rank = config.heads * (widths.key_width + widths.rotated), widths.query_width
        return LatentAttention(
            query_down=None if rank is None else linear(rank, config.width, bias=config.qkv_bias),
            query_norm=None if rank is None else norm(rank),
            query=linear(queries, config.width if rank is None else rank, bias=False),
            latent=linear(widths.slot_width, config.width, bias=config.qkv_bias),
            latent_norm=norm(widths.width),
            key_up=linear(config.heads, widths.key_width, widths.width, bias=False),
            value_up=linear(config.heads, widths.value_width, widths.width, bias=False),
            output=linear(config.width, config.heads * widths.value_width, bias=config.output_bias),
        )

    def gated_delta(rule: DeltaRule) -> GatedDelta:
        keys, values = rule.key_heads * rule.key_width, rule.value_heads * rule.value_width
        return GatedDelta(
            query=linear(keys, config.width, bias=False),
            key=linear(keys, config.width, bias=False),
            value=linear(values, config.width, bias=False),
            gate=linear(values, config.width, bias=False),
            output=linear(config.width, values, bias=False),
            beta=leaf(rule.value_heads, config.width),
            decay=leaf(rule.value_heads, config.width),
            decay_bias=leaf(rule.value_heads),
            log_rate=leaf(rule.value_heads),
            query_taps=leaf(keys, rule.taps),
            key_taps=leaf(keys, rule.taps),
            value_taps=leaf(values, rule.taps),
            norm=Norm(leaf(rule.value_width)),
            key_width=rule.key_width,
        )

    def short_conv(kind: ShortConvolution) -> ShortConv:
        return ShortConv(
            expand=linear(3 * config.width, config.width, bias=kind.bias),
            contract=linear(config.width, config.width, bias=kind.bias),
            taps=leaf(config.width, kind.taps),
            bias=leaf(config.width) if kind.bias else None,
        )

    def mixer(index: int, shape: LayerConfig) -> Any:
        if config.delta_rule is not None and index in config.delta_rule.layers:
            return gated_delta(config.delta_rule)
        if config.short_conv is not None and index in config.short_conv.layers:
            return short_conv(config.short_conv)
        return attention(index, shape) if config.latent is None else latent_attention(config.latent)

    def layer(index: int, shape: LayerConfig) -> LayerWeights:
        own_norms = config.mixture is not None and config.mixture.beside_mlp  # of the MLP and of the experts
        of_rule = config.delta_rule is not None and index in config.delta_rule.layers
        pre_norms, post_norms = config.pre_norms or of_rule, config.post_norms and not of_rule
        return LayerWeights(
            attention_norm=norm() if pre_norms else None,
            mixer=mixer(index, shape),
            mlp_norm=norm() if pre_norms and not (config.shared_norm or own_norms) else None,
            mlp=mlp(index),
            attention_post_norm=norm() if post_norms else None,
            mlp_post_norm=norm() if post_norms else None,
            embedding=None if config.layer_embeddings is None else embedding(config.layer_embeddings),
            laurel=None if config.laurel_rank is None else laurel(config.laurel_rank),
            streams=None if config.streams is None else layer_streams(config.streams.count),
            scale=leaf(1) if config.layer_scales else None,
        )

    learned = config.position == "learned"
    return Weights(
        embedding=leaf(config.vocab_size, config.width),
        positions=leaf(config.max_positions + config.position_offset, config.width) if learned else None,
        layers=tuple(itertools.starmap(layer, enumerate(config.layer_configs))),
        norm=norm(),
        unembedding=None if config.tied else linear(config.vocab_size, config.width, bias=config.unembedding_bias),
        streams=None if config.streams is None else model_streams(config.streams.count),
    )


def rounded_shapes(weights: Weights) -> Weights:
    """Return the shapes of weights with 8-bit linear maps, given the shapes of floating-point weights.

    A tied table is an unembedding of 8 bits, and the embedding is None.
    """

    def rounded(node: Any) -> Any:
        if not isinstance(node, Linear):
            return node
        codes = jax.ShapeDtypeStruct(node.weight.shape, jnp.int8)
        scale = jax.ShapeDtypeStruct(node.weight.shape[:-1], jnp.float32)
        return Linear(codes, node.bias, scale)  # type: ignore[arg-type]

    if weights.unembedding is None:
        weights = dataclasses.replace(weights, embedding=None, unembedding=weights.table)
    return jax.tree.map(rounded, weights, is_leaf=lambda node: isinstance(node, Linear))


def leaf_name(path: tuple[Any, ...]) -> str:
    """Return the dotted name of a leaf of `Weights`, such as `layers.0.mixer.query.weight`, from its tree path."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def random_weights(config: ModelConfig, key: PRNGKeyArray, dtype: DTypeLike = jnp.float32) -> Weights:
    """Draw random weights that keep activations near one; the values of two dtypes differ by rounding only."""
    # NumPy draws normals several times faster than JAX on a CPU, and benchmarks draw a hundred million of them.
    generator = np.random.default_rng(np.asarray(jax.random.key_data(key)))

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Array:
        x = generator.standard_normal(leaf.shape, np.float32)
        kind = leaf_name(path).rsplit(".", 1)[-1]
        if kind == "weight":
            x /= math.sqrt(leaf.shape[-1])
        elif kind == "scale":
            x = np.float32(not config.norm_offset) + np.float32(0.2) * x
        else:
            x *= 0.2  # tables and biases
        return jnp.asarray(x, dtype)

    return jax.tree_util.tree_map_with_path(draw, weight_shapes(config))


def empty_buffer(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Allocate an array that `jax.device_put` takes over on a CPU without a copy; do not change it afterwards."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def quantised(
    blocks: Iterable[Float[np.ndarray, "*rows in"]], shape: tuple[int, ...], dtype: DTypeLike = np.int8
) -> tuple[Int8[np.ndarray, "*out in"] | UInt8[np.ndarray, "*out in"], Float[np.ndarray, "*out"]]:
    """Quantize the weight of a linear map to 8-bit integers with one float32 scale per output channel.

    Args:
        blocks: the rows of the weight, in order: finite numbers of any float dtype. The number of largest magnitude in
            each row becomes 127 or -127.
        shape: shape of the weight.
        dtype: int8, or uint8 for codes that are 128 larger.
    """
    codes, scale = empty_buffer(shape, dtype), np.empty(shape[:-1], np.float32)
    offset = OFFSET if codes.dtype == np.uint8 else 0
    channels, factors, start = codes.reshape(-1, shape[-1]), scale.reshape(-1), 0
    step = max(1, _AT_ONCE // shape[-1])
    for block in blocks:
        rows = block.reshape(-1, shape[-1])
        for first in range(0, len(rows), step):
            wide = rows[first : first + step].astype(np.float32)
            end = start + len(wide)
            factors[start:end] = np.maximum(np.maximum(wide.max(1), -wide.min(1)) / 127, np.finfo(np.float32).tiny)
            wide /= factors[start:end, None]
            channels[start:end] = np.rint(wide, out=wide) + offset
            start = end
    return codes, scale
