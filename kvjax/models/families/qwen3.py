"""Qwen3: Llama with norms of queries and keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvjax.models.config import ModelConfig
from kvjax.models.families.common import LLAMA_DEFAULTS, LLAMA_SOURCES, llama_config
from kvjax.models.families.family import Family, Settings, Source
from kvjax.models.families.settings import upper_windows

QUERY_KEY_NORMS: Mapping[str, Source] = {
    "layers.query_norm.scale": Source("model.layers.{layer}.self_attn.q_norm.weight"),
    "layers.key_norm.scale": Source("model.layers.{layer}.self_attn.k_norm.weight"),
}


def _config(settings: Settings) -> ModelConfig:
    shape = llama_config(settings)
    return dataclasses.replace(shape, windows=upper_windows(settings), query_key_norms=True)


QWEN3 = Family(
    _config,
    {**LLAMA_SOURCES, **QUERY_KEY_NORMS},
    {
        **LLAMA_DEFAULTS,
        "vocab_size": 151_936,
        "intermediate_size": 22_016,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    only={"mlp_bias": (False,)},
)
