"""OLMo 2: norms of outputs instead of inputs, and norms of queries and keys over all heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.models.config import ModelConfig
from kvjax.models.families.common import LLAMA_DEFAULTS, LLAMA_SOURCES, llama_config
from kvjax.models.families.family import Family, Settings, Source
from kvjax.models.families.qwen3 import QUERY_KEY_NORMS

OLMO2_SOURCES: Mapping[str, Source] = {
    **LLAMA_SOURCES,
    **QUERY_KEY_NORMS,
    "layers.attention_post_norm.scale": Source("model.layers.{layer}.post_attention_layernorm.weight"),
    "layers.mlp_post_norm.scale": Source("model.layers.{layer}.post_feedforward_layernorm.weight"),
}
OLMO2_DEFAULTS: Mapping[str, Any] = {
    **LLAMA_DEFAULTS,
    "vocab_size": 50_304,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50_279,
}


def olmo2_config(settings: Settings) -> ModelConfig:
    """Return the config that OLMo 2 and 3 have in common."""
    return dataclasses.replace(
        llama_config(settings),
        pre_norms=False,
        post_norms=True,
        query_key_norms=True,
        query_key_norm_over="heads",
    )


OLMO2 = Family(olmo2_config, OLMO2_SOURCES, OLMO2_DEFAULTS, only={"mlp_bias": (False,)})
