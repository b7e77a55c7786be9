"""Attention to the keys and values of an earlier layer."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from kvjax.cache.layer import MixerInput
from kvjax.cache.shared import Shared
from kvjax.models.attention import grown, project_output
from kvjax.models.config import ModelConfig
from kvjax.models.linear import Linear, Norm, normalise


@struct.dataclass
class SharedAttention:
    """Weights of attention without keys and values; the last two are None in models without them (Gemma 3n and 4)."""

    query: Linear
    output: Linear
    query_norm: Norm | None = None
    sink_logits: Float[Array, " heads"] | None = None

    cache_kind: ClassVar[type[Shared]] = Shared

    def init_cache(self, tokens: MixerInput, limit: Int[Array, "b h"], slots: int) -> Shared:
        """Return a cache that reads the layer's source."""
        assert tokens.shape.source is not None
        return Shared(source=tokens.shape.source)

    def __call__(
        self, x: Float[Array, "b t width"], config: ModelConfig, cache: Any, tokens: MixerInput
    ) -> tuple[Float[Array, "b t width"], Any]:
        """Project tokens to queries, attend from them to the earlier layer's cache, and project back."""
        shape, (b, t, _) = tokens.shape, x.shape
        q = self.query(x).reshape(b, t, shape.kv_heads, shape.groups, shape.key_width)
        q = normalise(self.query_norm, q, config) if shape.normed else q
        q = q if config.qkv_clip is None else jnp.clip(q, -config.qkv_clip, config.qkv_clip)
        q = grown(q, config, shape, tokens.reading.position).transpose(0, 2, 3, 1, 4)
        sinks = None if self.sink_logits is None else self.sink_logits.reshape(shape.kv_heads, shape.groups)
        attended, cache = cache.attend(tokens, q, sinks)
        return project_output(self.output, attended.astype(x.dtype), cache, tokens)
