"""OLMoE, OLMo 2 and 3, and EXAONE 4: Llama with norms of queries and keys, in OLMo over all heads.

OLMoE has a mixture of experts. The others normalize outputs instead of inputs. OLMo 3 and larger EXAONE 4 have a window
in three of four layers. The other layers have scaled RoPE in OLMo 3, and none in EXAONE 4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.models.config import ModelConfig
from kvjax.models.families.family import SIZES, Family, Settings, Source, expert_sources
from kvjax.models.families.llama import LLAMA_SOURCES, QUERY_KEY_NORMS, llama_config
from kvjax.models.families.settings import (
    flag,
    integer,
    optional_number,
    periodic_windows,
    read_mixture,
    ropes_of_layers,
    rotated_in_windows,
)

_SOURCES: Mapping[str, Source] = {
    **LLAMA_SOURCES,
    **QUERY_KEY_NORMS,
    "layers.attention_post_norm.scale": Source("model.layers.{layer}.post_attention_layernorm.weight"),
    "layers.mlp_post_norm.scale": Source("model.layers.{layer}.post_feedforward_layernorm.weight"),
}
_DEFAULTS: Settings = {"hidden_act": "silu", "eos_token_id": 50_279}
_ONLY = {"mlp_bias": (False,)}


def _config(settings: Settings, **fields: Any) -> ModelConfig:
    return llama_config(settings, query_key_norms=True, query_key_norm_over="heads", **fields)


def _olmoe(settings: Settings) -> ModelConfig:
    return _config(
        settings,
        qkv_clip=optional_number(settings, "clip_qkv"),
        mixture=read_mixture(settings, renormalised=flag(settings, "norm_topk_prob")),
    )


def _olmo2(settings: Settings, **fields: Any) -> ModelConfig:
    return _config(settings, pre_norms=False, post_norms=True, **fields)


def _olmo3(settings: Settings) -> ModelConfig:
    plain = {**settings, "rope_parameters": None, "rope_scaling": None}
    shape = _olmo2(plain, windows=periodic_windows(settings, 4))
    return dataclasses.replace(shape, rope=None, ropes=ropes_of_layers(settings, shape, settings["rope_theta"]))


def _exaone4(settings: Settings) -> ModelConfig:
    shape = llama_config(settings, pre_norms=False, post_norms=True, query_key_norms=True)
    if settings.get("sliding_window") is None:
        return shape
    # Beside layer_types, the pattern may be a text such as LLLG.
    period = 1 if settings.get("layer_types") else integer(settings, "sliding_window_pattern")
    return rotated_in_windows(dataclasses.replace(shape, windows=periodic_windows(settings, period)))


FAMILIES: Mapping[str, Family] = {
    "olmoe": Family(
        _olmoe,
        {**LLAMA_SOURCES, **QUERY_KEY_NORMS, **expert_sources("model.layers.{layer}.mlp")},
        _DEFAULTS,
        _ONLY,
        aliases={"num_local_experts": "num_experts"},
        looked_up=(*SIZES, "num_experts", "num_experts_per_tok"),
    ),
    "olmo2": Family(_olmo2, _SOURCES, _DEFAULTS, _ONLY),
    "olmo3": Family(
        _olmo3,
        _SOURCES,
        {**_DEFAULTS, "rope_theta": 500_000.0},
        _ONLY,
        looked_up=(*SIZES, "sliding_window"),
    ),
    "exaone4": Family(
        _exaone4,
        _SOURCES,
        {"hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 2, "sliding_window_pattern": 4},
        {"attention_bias": (False,), **_ONLY},
        looked_up=(*SIZES, "num_key_value_heads", "sliding_window"),
    ),
}
