"""Qwen3 with a mixture of experts."""

from __future__ import annotations

import dataclasses

from kvjax.models.config import ModelConfig
from kvjax.models.families.common import LLAMA_DEFAULTS, LLAMA_SOURCES, llama_config
from kvjax.models.families.family import Family, Settings
from kvjax.models.families.mixture import expert_sources, read_mixture
from kvjax.models.families.qwen3 import QUERY_KEY_NORMS
from kvjax.models.families.settings import flag, integer, layer_numbers


def _config(settings: Settings) -> ModelConfig:
    shape = llama_config(settings, windowed=flag(settings, "use_sliding_window"))
    mixture = read_mixture(
        settings, "moe_intermediate_size", flag(settings, "norm_topk_prob"), _dense_layers(settings, shape.layers)
    )
    return dataclasses.replace(shape, query_key_norms=True, mixture=mixture)


def _dense_layers(settings: Settings, layers: int) -> tuple[int, ...]:
    step, dense = integer(settings, "decoder_sparse_step"), layer_numbers(settings, "mlp_only_layers") or []
    return tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % step)


QWEN3_MOE = Family(
    _config,
    {**LLAMA_SOURCES, **QUERY_KEY_NORMS, **expert_sources("model.layers.{layer}.mlp")},
    {
        **LLAMA_DEFAULTS,
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "norm_topk_prob": False,
    },
    only={"mlp_bias": (False,)},
)
