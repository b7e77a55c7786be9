"""Forward pass of a decoder for every family: embed, loop over blocks, unembed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.cache.layer import LayerCache, MixerInput
from kvjax.cache.slots import Slots
from kvjax.cache.uncached import Uncached
from kvjax.models.config import ModelConfig
from kvjax.models.layer_embedding import LayerEmbedding
from kvjax.models.linear import Linear, Norm, normalise
from kvjax.models.streams import Laurel, LayerStreams, ModelStreams
from kvjax.policies.policy import Policy
from kvjax.rope import Turns
from kvjax.types import HEADS, SLOTS, LayerConfig, TokenBatch, setting
from pallas_kernels.attention import wide


class Mixer(Protocol):
    """First half of a layer, which mixes tokens: a pytree of weights that knows the kind of its cache."""

    @property
    def cache_kind(self) -> type[LayerCache]:
        """Class of the layer's cache."""
        ...

    def init_cache(self, tokens: MixerInput, limit: Int[Array, "b h"], slots: int) -> LayerCache:
        """Return a cache that has read nothing.

        Args:
            tokens: no tokens of the layer, in the shapes that it reads.
            limit: slots that each head may use, for mixers with attention.
            slots: slots of each head in the buffers.
        """
        ...

    def __call__(
        self, x: Float[Array, "b t width"], config: ModelConfig, cache: Any, tokens: MixerInput
    ) -> tuple[Float[Array, "b t width"], Any]:
        """Return the outputs of the tokens of `x`, and the cache after they were read."""
        ...


@struct.dataclass
class LayerWeights:
    """Weights of one decoder block.

    `attention_norm` is None if only outputs are normalized, and `mlp_norm` also if attention and MLP share one norm.
    `mixer`, a `Mixer`, and `mlp` are pytrees. The last six are None in models without them; `scale` multiplies the
    hidden states after the layer.
    """

    attention_norm: Norm | None
    mixer: Any
    mlp_norm: Norm | None
    mlp: Callable[[Float[Array, "b t width"], ModelConfig], Float[Array, "b t width"]]
    attention_post_norm: Norm | None = None
    mlp_post_norm: Norm | None = None
    embedding: LayerEmbedding | None = None
    laurel: Laurel | None = None
    streams: LayerStreams | None = None
    scale: Float[Array, "1"] | None = None


class RoundedFrom(NamedTuple):
    """Model in floating point whose weights were rounded to 8-bit integers; see `kvjax.models.fingerprint`."""

    shape: str
    fingerprint: str


@struct.dataclass
class Weights:
    """All weights of a model.

    `unembedding` is None if it is tied to the embedding, and `embedding` is None if it is tied to an unembedding of
    8-bit integers. `streams` is None if tokens have one hidden state. `rounded_from` is None for weights in floating
    point, or if it is unknown.
    """

    embedding: Float[Array, "vocab width"] | None
    positions: Float[Array, "positions width"] | None
    layers: tuple[LayerWeights, ...]
    norm: Norm
    unembedding: Linear | None
    streams: ModelStreams | None = None
    rounded_from: RoundedFrom | None = struct.field(pytree_node=False, default=None)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of hidden states."""
        return (self.table.weight if self.norm.scale is None else self.norm.scale).dtype

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
    """Compute token embeddings, scaled or normalized if the model does so, plus learned position embeddings."""
    table = weights.table
    if config.spread.vocab:
        # Each device looks up the tokens of its shard of the table; each token is in one shard.
        local = tokens - jax.lax.axis_index((HEADS, SLOTS)) * len(table.weight)
        in_shard = (local >= 0) & (local < len(table.weight))
        rows = jnp.where(in_shard[..., None], table.rows(jnp.where(in_shard, local, 0)), 0)
        x = config.spread.over_devices(rows).astype(weights.dtype)
    else:
        x = table.rows(tokens).astype(weights.dtype)
    if config.embedding_scale is not None:
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
    if weights.positions is not None:
        x = x + weights.positions[jnp.maximum(positions, 0) + config.position_offset]
    return normalise(None, x, config) if config.embedding_norm else x


def begin(weights: Weights, config: ModelConfig, reading: TokenBatch) -> tuple[TokenBatch, Float[Array, "b t width"]]:
    """Return tokens as the layers of a model read them, and hidden states before the first layer."""
    x = embed(weights, config, reading.token, reading.position)
    reading = reading if config.layer_embeddings is None else reading.replace(embedding=x)
    return reading, x if weights.streams is None else weights.streams.expanded(x)


class Layer(struct.PyTreeNode):
    """One layer of a model, and the policy as the layer uses it."""

    weights: LayerWeights
    policy: Policy
    number: int | Int[Array, ""]
    """Index in the model; an array in programs that equal layers share."""
    config: ModelConfig = setting(None)
    like: int = setting(0)
    """Index of the first layer of the same shape."""

    @property
    def shape(self) -> LayerConfig:
        """Attention of the layer."""
        return self.config.layer_configs[self.like]

    def tokens(self, reading: TokenBatch, x: Float[Array, "b t width"], turns: Turns | None = None) -> MixerInput:
        """Return tokens as the layer reads them, from its input."""
        return MixerInput(reading, x, self.shape, self.number, self.policy, turns)

    def init_cache(self, limit: Int[Array, "b h"], slots: int, dtype: DTypeLike) -> LayerCache:
        """Return a cache that has read nothing, see `Mixer.init_cache`."""
        reading = TokenBatch.of_text(jnp.zeros((len(limit), 0), jnp.int32), jnp.zeros(len(limit), jnp.int32))
        nothing = jnp.zeros((len(limit), 0, self.shape.width), dtype)
        return self.weights.mixer.init_cache(self.tokens(reading, nothing), limit, slots)


def block(
    layer: Layer, cache: Any, reading: TokenBatch, x: Float[Array, "b t width"], turns: Turns | None = None
) -> tuple[Float[Array, "b t width"], Any]:
    """Run tokens through a layer: its mixer and its MLP, with norms and residual connections.

    Args:
        cache: layer cache of the mixer's kind, see `Mixer`.
        reading: the tokens of `x`.
        x: hidden states before the layer.
        turns: rotations of queries and keys, if layers share them.

    Returns:
        Hidden states after the layer, and the cache after its mixer.
    """
    weights, config = layer.weights, layer.config
    streams, predicted = weights.streams, None
    if streams is not None:
        predicted = streams.predict(x, config)
        x = streams.active(predicted, config)
    x, cache = _update(layer, cache, reading, x, turns)
    if streams is not None and predicted is not None:
        assert weights.embedding is not None
        states = streams.correct(predicted, x, config)
        states = states.at[:, :, 1:].add(
            weights.embedding(streams.gate_input(states, config), reading, config)[:, :, None]
        )
        return states.reshape(*x.shape[:2], -1), cache
    if weights.embedding is not None:
        x = x + weights.embedding(x, reading, config)
    return x if weights.scale is None else x * weights.scale, cache


def _update(
    layer: Layer, cache: Any, reading: TokenBatch, x: Float[Array, "b t width"], turns: Turns | None
) -> tuple[Float[Array, "b t width"], Any]:
    # Returns one hidden state of each token after the layer's mixer and MLP, and the cache.
    weights, config = layer.weights, layer.config
    normed = x if weights.attention_norm is None else normalise(weights.attention_norm, x, config)
    mixed, cache = weights.mixer(normed, config, cache, layer.tokens(reading, x, turns))
    if weights.attention_post_norm is not None:
        mixed = normalise(weights.attention_post_norm, mixed, config)

    def scaled(out: Float[Array, "b t width"]) -> Float[Array, "b t width"]:
        return out if config.residual_scale is None else out * config.residual_scale

    if config.parallel:
        mlp_input = normed if weights.mlp_norm is None else normalise(weights.mlp_norm, x, config)
        x = x + scaled(mixed) + scaled(weights.mlp(mlp_input, config))
    else:
        x = x + scaled(mixed)
        if weights.laurel is not None:
            x = (x + weights.laurel(normed, config)) * jnp.asarray(2**-0.5, x.dtype)
        y = weights.mlp(x if weights.mlp_norm is None else normalise(weights.mlp_norm, x, config), config)
        x = x + scaled(y if weights.mlp_post_norm is None else normalise(weights.mlp_post_norm, y, config))
    return x, cache


def layers_of(weights: Weights, config: ModelConfig, policy: Policy | None = None) -> list[Layer]:
    """Return all layers of a model, each with a policy as it uses it; None for a policy that nothing will ask."""
    first = [config.layer_configs.index(shape) for shape in config.layer_configs]
    # A layer that reads another one's slots uses them as that layer's policy has them.
    owners = [index if shape.source is None else shape.source for index, shape in enumerate(config.layer_configs)]
    of_layers: Any = [None] * config.layers if policy is None else [policy.layer(owner) for owner in owners]
    return [
        Layer(layer, of_layers[number], number, config, first[number]) for number, layer in enumerate(weights.layers)
    ]


def unembed(weights: Weights, config: ModelConfig, x: Float[Array, "*b width"]) -> Float[Array, "*b vocab"]:
    """Apply the final norm and compute logits in at least float32, scaled and soft-capped if the model does so."""
    x = normalise(weights.norm, x if weights.streams is None else weights.streams.merged(x), config)
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
    # The causal mask hides padding from real tokens, but ids outside the table would still give NaN.
    tokens = jnp.where(jnp.arange(tokens.shape[1]) < lengths[:, None], tokens, 0)
    reading = TokenBatch.of_text(tokens, lengths)
    reading, x = begin(weights, config, reading)
    caches = list[LayerCache]()
    for layer in layers_of(weights, config):
        limit = jnp.zeros((len(tokens), layer.shape.kv_heads), jnp.int32)  # no slots, as nothing is kept
        has_slots = layer.weights.mixer.cache_kind is Slots
        cache = Uncached() if has_slots else layer.init_cache(limit, 0, x.dtype)
        x, cache = block(layer, cache.link(caches, None), reading, x)
        caches.append(cache)
    return unembed(weights, config, x)
