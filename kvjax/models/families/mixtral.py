"""Mixtral: Mistral with a mixture of experts."""

from __future__ import annotations

import dataclasses

from kvjax.models.config import ModelConfig
from kvjax.models.families.common import LLAMA_DEFAULTS, LLAMA_SOURCES, llama_config
from kvjax.models.families.family import Family, Settings
from kvjax.models.families.mixture import expert_sources, read_mixture


def _config(settings: Settings) -> ModelConfig:
    mixture = read_mixture(settings, "intermediate_size", renormalised=True)
    return dataclasses.replace(llama_config(settings, windowed=True), mixture=mixture)


MIXTRAL = Family(
    _config,
    {**LLAMA_SOURCES, **expert_sources("model.layers.{layer}.block_sparse_moe", ("w1", "w3", "w2"))},
    {
        **LLAMA_DEFAULTS,
        "intermediate_size": 14_336,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    only={"attention_bias": (False,), "mlp_bias": (False,)},
)
