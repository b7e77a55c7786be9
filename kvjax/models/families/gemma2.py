"""Gemma 2: Gemma with norms before and after attention and MLP, soft caps, and a window in every other layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.models.config import ModelConfig
from kvjax.models.families.common import LLAMA_SOURCES
from kvjax.models.families.family import Family, Settings, Source
from kvjax.models.families.gemma import GEMMA_DEFAULTS, GEMMA_ONLY, gemma_config
from kvjax.models.families.settings import LAYER_TYPES, integer, positive_number, read_windows
from kvjax.models.families.sources import module_sources

_NORMS = {
    "layers.attention_post_norm": "post_attention_layernorm",
    "layers.mlp_norm": "pre_feedforward_layernorm",
    "layers.mlp_post_norm": "post_feedforward_layernorm",
}
GEMMA2_SOURCES: Mapping[str, Source] = {**LLAMA_SOURCES, **module_sources("model.layers", _NORMS)}
GEMMA2_DEFAULTS: Mapping[str, Any] = {
    **GEMMA_DEFAULTS,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}


def gemma2_config(settings: Settings, period: int) -> ModelConfig:
    """Return the config of a model with a window in all layers except one in every `period`, or by `layer_types`."""

    def cap(key: str) -> float | None:
        return None if settings[key] is None else float(positive_number(settings, key))

    layers = range(integer(settings, "num_hidden_layers"))
    return dataclasses.replace(
        gemma_config({**settings, "hidden_act": settings["hidden_activation"]}),
        attention_scale=positive_number(settings, "query_pre_attn_scalar") ** -0.5,
        soft_cap=cap("attn_logit_softcapping"),
        logit_soft_cap=cap("final_logit_softcapping"),
        windows=read_windows(settings, [LAYER_TYPES[(index + 1) % period > 0] for index in layers]),
        post_norms=True,
    )


def _config(settings: Settings) -> ModelConfig:
    return gemma2_config(settings, 2)


GEMMA2 = Family(_config, GEMMA2_SOURCES, GEMMA2_DEFAULTS, GEMMA_ONLY)
