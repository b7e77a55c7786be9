"""OLMoE and OLMo 2 and 3: Llama with norms of queries and keys over all heads.

OLMoE has a mixture of experts. OLMo 2 normalizes outputs instead of inputs. OLMo 3 has a window in three of four
layers, and scaled RoPE in the other layers only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.models.config import ModelConfig
from kvjax.models.families.common import LLAMA_DEFAULTS, LLAMA_SOURCES, QUERY_KEY_NORMS, llama_config
from kvjax.models.families.family import Family, Settings, Source
from kvjax.models.families.settings import (
    LAYER_TYPES,
    flag,
    integer,
    optional_number,
    read_mixture,
    read_rope,
    read_windows,
    rope_of_type,
    rope_parts,
)
from kvjax.models.families.sources import expert_sources

_SOURCES: Mapping[str, Source] = {
    **LLAMA_SOURCES,
    **QUERY_KEY_NORMS,
    "layers.attention_post_norm.scale": Source("model.layers.{layer}.post_attention_layernorm.weight"),
    "layers.mlp_post_norm.scale": Source("model.layers.{layer}.post_feedforward_layernorm.weight"),
}
_DEFAULTS: Mapping[str, Any] = {
    **LLAMA_DEFAULTS,
    "vocab_size": 50_304,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50_279,
}
_ONLY = {"mlp_bias": (False,)}


def _normed(settings: Settings) -> ModelConfig:
    return dataclasses.replace(llama_config(settings), query_key_norms=True, query_key_norm_over="heads")


def _olmoe(settings: Settings) -> ModelConfig:
    return dataclasses.replace(
        _normed(settings),
        qkv_clip=optional_number(settings, "clip_qkv"),
        mixture=read_mixture(settings, "intermediate_size", flag(settings, "norm_topk_prob")),
    )


def _olmo2(settings: Settings) -> ModelConfig:
    return dataclasses.replace(_normed(settings), pre_norms=False, post_norms=True)


def _olmo3(settings: Settings) -> ModelConfig:
    shape = _olmo2({**settings, "rope_parameters": None, "rope_scaling": None})
    full, sliding = (read_rope(_of_type(settings, kind), shape.head_width) for kind in LAYER_TYPES)
    layers = range(integer(settings, "num_hidden_layers"))
    windows = read_windows(settings, [LAYER_TYPES[(index + 1) % 4 > 0] for index in layers])
    ropes = tuple(full if window is None else sliding for window in windows or (None,) * shape.layers)
    return dataclasses.replace(shape, rope=None, ropes=ropes, windows=windows)


def _of_type(settings: Settings, kind: str) -> Settings:
    """Return the settings with the RoPE of one type of layer; one RoPE is scaled in full layers only."""
    scaling, given = rope_parts(settings)
    full = kind == "full_attention"
    if set(given) <= set(LAYER_TYPES):
        own = rope_of_type(given, kind, scaling if full else {})
        return {**settings, "rope_parameters": own, "rope_scaling": None}
    if full:
        return settings
    theta = given.get("rope_theta", settings["rope_theta"])
    return {**settings, "rope_parameters": {"rope_theta": theta}, "rope_scaling": None}


OLMOE = Family(
    _olmoe,
    {**LLAMA_SOURCES, **QUERY_KEY_NORMS, **expert_sources("model.layers.{layer}.mlp")},
    {
        **_DEFAULTS,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
        "clip_qkv": None,
        "num_experts_per_tok": 8,
        "num_experts": 64,
        "norm_topk_prob": False,
    },
    _ONLY,
)
OLMO2 = Family(_olmo2, _SOURCES, _DEFAULTS, _ONLY)
OLMO3 = Family(_olmo3, _SOURCES, {**_DEFAULTS, "rope_theta": 500_000.0, "sliding_window": 4096}, _ONLY)
