"""OLMoE: a mixture of experts, with norms of queries and keys over all heads."""

from __future__ import annotations

import dataclasses

from kvjax.models.config import ModelConfig
from kvjax.models.families.common import LLAMA_DEFAULTS, LLAMA_SOURCES, llama_config
from kvjax.models.families.family import Family, Settings
from kvjax.models.families.mixture import expert_sources, read_mixture
from kvjax.models.families.qwen3 import QUERY_KEY_NORMS
from kvjax.models.families.settings import flag, positive_number


def _config(settings: Settings) -> ModelConfig:
    return dataclasses.replace(
        llama_config(settings),
        query_key_norms=True,
        query_key_norm_over="heads",
        qkv_clip=None if settings["clip_qkv"] is None else positive_number(settings, "clip_qkv"),
        mixture=read_mixture(settings, "intermediate_size", flag(settings, "norm_topk_prob")),
    )


OLMOE = Family(
    _config,
    {**LLAMA_SOURCES, **QUERY_KEY_NORMS, **expert_sources("model.layers.{layer}.mlp")},
    {
        **LLAMA_DEFAULTS,
        "vocab_size": 50_304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "clip_qkv": None,
        "num_experts_per_tok": 8,
        "num_experts": 64,
        "norm_topk_prob": False,
        "eos_token_id": 50_279,
    },
    only={"mlp_bias": (False,)},
)
