"""Ministral 3: Mistral with YaRN, and queries that grow with their positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.models.config import ModelConfig, QueryGrowth
from kvjax.models.families.common import LLAMA_DEFAULTS, LLAMA_SOURCES, llama_config
from kvjax.models.families.family import Family, Settings
from kvjax.models.families.settings import given_rope, integer, positive_number, with_default_rope

_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "llama_4_scaling_beta": 0.1,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def _config(settings: Settings) -> ModelConfig:
    settings = with_default_rope(settings, _ROPE)
    shape, rope = llama_config(settings, windowed=True), given_rope(settings)
    if not rope.get("llama_4_scaling_beta"):
        return shape
    slope, length = positive_number(rope, "llama_4_scaling_beta"), integer(rope, "original_max_position_embeddings")
    return dataclasses.replace(shape, query_growth=QueryGrowth(slope, length))


MINISTRAL3 = Family(
    _config,
    LLAMA_SOURCES,
    {
        **LLAMA_DEFAULTS,
        "vocab_size": 131_072,
        "intermediate_size": 14_336,
        "num_hidden_layers": 34,
        "max_position_embeddings": 262_144,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    only={"attention_bias": (False,), "mlp_bias": (False,)},
)
