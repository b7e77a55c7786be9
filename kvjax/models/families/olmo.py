"""OLMoE and OLMo 2 and 3: Llama with norms of queries and keys over all heads.

OLMoE has a mixture of experts. OLMo 2 normalizes outputs instead of inputs. OLMo 3 has a window in three of four
layers, and scaled RoPE in the other layers only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.models.config import ModelConfig
from kvjax.models.families.family import SIZES, Family, Settings, Source, expert_sources
from kvjax.models.families.llama import LLAMA_SOURCES, QUERY_KEY_NORMS, llama_config
from kvjax.models.families.settings import flag, optional_number, periodic_windows, read_mixture, ropes_of_layers

POST_NORM_SOURCES: Mapping[str, Source] = {
    **LLAMA_SOURCES,
    "layers.attention_post_norm.scale": Source("model.layers.{layer}.post_attention_layernorm.weight"),
    "layers.mlp_post_norm.scale": Source("model.layers.{layer}.post_feedforward_layernorm.weight"),
}
"""Sources of a Llama that normalizes outputs instead of inputs."""
_SOURCES: Mapping[str, Source] = {**POST_NORM_SOURCES, **QUERY_KEY_NORMS}
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
}
