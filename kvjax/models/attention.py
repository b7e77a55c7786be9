"""Grouped-query attention as a layer's mixer: projections before and after attention to the layer's cache."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from kvjax.cache.host import new_slots
from kvjax.cache.layer import MixerInput
from kvjax.cache.slots import Slots
from kvjax.models.config import ModelConfig
from kvjax.models.linear import Linear, Norm, normalise
from kvjax.rope import Turns, rotate_by
from kvjax.types import ALONE, LayerConfig, TokenBatch
from pallas_kernels.attention import wide


@struct.dataclass
class Attention:
    """Weights of grouped-query attention.

    `value` is None if values are the projected keys; the last four are None in models without them.
    """

    query: Linear
    key: Linear
    value: Linear | None
    output: Linear
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    sink_logits: Float[Array, " heads"] | None = None
    gate: Linear | None = None

    cache_kind: ClassVar[type[Slots]] = Slots

    def init_cache(self, tokens: MixerInput, limit: Int[Array, "b h"], slots: int) -> Slots:
        """Return a cache of empty slots.

        Args:
            tokens: no tokens of the layer, in the shapes that it reads.
            limit: slots that each head may use.
            slots: slots of each head in the buffers.
        """
        return new_slots(tokens, limit, slots)

    def __call__(
        self, x: Float[Array, "b t width"], config: ModelConfig, cache: Any, tokens: MixerInput
    ) -> tuple[Float[Array, "b t width"], Any]:
        """Project tokens, attend from them to the layer's cache, and project back.

        Args:
            x: input of the layer, normalized unless the model normalizes outputs only.
            cache: layer cache with the method `attend`, as `Slots` has it.
            tokens: the tokens of `x`.

        Returns:
            Outputs, and the cache afterwards.
        """
        shape = tokens.shape
        q, k, v = self.project(x, config, shape, tokens.reading)
        # Logits of learned sinks by KV head; None for a layer without sinks.
        sinks = None if self.sink_logits is None else self.sink_logits.reshape(shape.kv_heads, shape.groups)
        attended, cache = cache.attend(tokens, q, k, v, sinks)
        gate = None if self.gate is None else jax.nn.sigmoid(self.gate(x))
        return project_output(self.output, attended.astype(x.dtype), cache, tokens, gate)

    def project(
        self, x: Float[Array, "b t width"], config: ModelConfig, shape: LayerConfig, reading: TokenBatch
    ) -> tuple[Float[Array, "b h g t d"], Float[Array, "b h t d"], Float[Array, "b h t e"]]:
        """Return queries, keys and values before the RoPE of `shape`.

        Query head i uses KV head i // g: the heads of one group are adjacent.
        """
        b, t, _ = x.shape
        q, k = self.query(x), self.key(x)
        v = k if self.value is None else self.value(x)
        if config.query_key_norm_over == "heads":
            q, k = self._normalise_heads(config, q, k)
        q = q.reshape(b, t, shape.kv_heads, shape.groups, shape.key_width)
        k = k.reshape(b, t, shape.kv_heads, shape.key_width)
        v = v.reshape(b, t, shape.kv_heads, shape.value_width)
        if config.norms_after_rope:
            assert config.rope is not None
            turns = reading.turns(config.rope, x.dtype)
            q = rotate_by(config.rope, q, Turns(*(table[:, :, None, None] for table in turns)))
            k = rotate_by(config.rope, k, Turns(*(table[:, :, None] for table in turns)))
        if shape.normed and config.query_key_norm_over == "head":
            q, k = normalise(self.query_norm, q, config), normalise(self.key_norm, k, config)
        v = normalise(None, v, config) if config.value_norms else v
        if config.qkv_clip is not None:
            q, k, v = (jnp.clip(x, -config.qkv_clip, config.qkv_clip) for x in (q, k, v))
        q = grown(q, config, shape, reading.position)
        return q.transpose(0, 2, 3, 1, 4), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)

    def output_by_head(self, shape: LayerConfig) -> Float[Array, "h g e width"]:
        """Return the map from attention to the layer's output, for each query head."""
        return self.output.matrix.T.reshape(shape.kv_heads, shape.groups, shape.value_width, -1)

    def _normalise_heads(
        self, config: ModelConfig, q: Float[Array, "b t f"], k: Float[Array, "b t e"]
    ) -> tuple[Float[Array, "b t f"], Float[Array, "b t e"]]:
        """Apply RMS normalization to queries and to keys over all heads; one sum over devices serves both."""
        assert self.query_norm is not None and self.key_norm is not None
        pairs = [(q, self.query_norm), (k, self.key_norm)]
        squares = jnp.stack([jnp.mean(x.astype(wide(x.dtype)) ** 2, -1) for x, _ in pairs])
        means = config.spread.over_heads(squares) / config.spread.heads
        factors = jax.lax.rsqrt(means + config.norm_eps)[..., None]
        q, k = ((x * factor).astype(x.dtype) * norm.scale for (x, norm), factor in zip(pairs, factors, strict=True))
        return q, k


def grown(
    q: Float[Array, "b t h g d"], config: ModelConfig, shape: LayerConfig, positions: Int[Array, "b t"]
) -> Float[Array, "b t h g d"]:
    """Multiply queries by their positions' factors, in a model whose queries grow."""
    growth = config.query_growth
    if growth is None or (growth.unrotated and shape.rope is not None):
        return q
    stretch = (jnp.maximum(positions, 0) + growth.offset) // growth.length
    factor = 1 + growth.slope * jnp.log1p(stretch.astype(wide(q.dtype)))
    return q * factor[:, :, None, None, None].astype(q.dtype)


def project_output(
    output: Linear,
    attended: Float[Array, "b h g t e"],
    cache: Any,
    tokens: MixerInput,
    gate: Float[Array, "b t gates"] | None = None,
) -> tuple[Float[Array, "b t width"], Any]:
    """Apply a layer's output projection to attention, and return the cache after that, too.

    The results of devices are summed. A `gate` multiplies each feature, or all features of each head.
    """
    shape, (rows, _, _, count, _) = tokens.shape, attended.shape
    attended = attended.transpose(0, 3, 1, 2, 4).reshape(rows, count, shape.heads, shape.value_width)
    attended = attended if gate is None else attended * gate.reshape(rows, count, shape.heads, -1)
    attended = attended.reshape(rows, count, -1)
    if shape.spread == ALONE:
        return output(attended), cache
    out = dataclasses.replace(output, bias=None)(shape.spread.own_features(attended))
    out, cache = cache.sum_outputs(tokens, out)
    return out if output.bias is None else out + output.bias, cache
