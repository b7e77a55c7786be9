"""Mistral, Ministral 3 and Mixtral: Llama with a sliding window.

Ministral 3 has YaRN, and queries that grow with their positions. Mixtral has a mixture of experts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from kvjax.models.config import ModelConfig, QueryGrowth
from kvjax.models.families.common import LLAMA_DEFAULTS, LLAMA_SOURCES, llama_config
from kvjax.models.families.family import Family, Settings
from kvjax.models.families.settings import given_rope, integer, positive_number, read_mixture, with_default_rope
from kvjax.models.families.sources import expert_sources

_DEFAULTS: Mapping[str, Any] = {
    **LLAMA_DEFAULTS,
    "intermediate_size": 14_336,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ONLY = {"attention_bias": (False,), "mlp_bias": (False,)}
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


def _ministral3(settings: Settings) -> ModelConfig:
    settings = with_default_rope(settings, _ROPE)
    shape, rope = llama_config(settings, windowed=True), given_rope(settings)
    if not rope.get("llama_4_scaling_beta"):
        return shape
    slope, length = positive_number(rope, "llama_4_scaling_beta"), integer(rope, "original_max_position_embeddings")
    return dataclasses.replace(shape, query_growth=QueryGrowth(slope, length))


def _mixtral(settings: Settings) -> ModelConfig:
    mixture = read_mixture(settings, "intermediate_size", renormalised=True)
    return dataclasses.replace(llama_config(settings, windowed=True), mixture=mixture)


MISTRAL = Family(functools.partial(llama_config, windowed=True), LLAMA_SOURCES, _DEFAULTS, _ONLY)
MINISTRAL3 = Family(
    _ministral3,
    LLAMA_SOURCES,
    {
        **_DEFAULTS,
        "vocab_size": 131_072,
        "num_hidden_layers": 34,
        "max_position_embeddings": 262_144,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    _ONLY,
)
MIXTRAL = Family(
    _mixtral,
    {**LLAMA_SOURCES, **expert_sources("model.layers.{layer}.block_sparse_moe", ("w1", "w3", "w2"))},
    {
        **_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
    _ONLY,
    aliases={"num_experts": "num_local_experts"},
)
