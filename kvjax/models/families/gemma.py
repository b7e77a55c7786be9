"""Gemma 1 to 3 (text) and VaultGemma: Llama with scaled embeddings, wider heads and norms that multiply by 1 + weight.

Gemma 2 adds norms after attention and MLP, soft caps, and a window in every other layer. VaultGemma omits the
norms. Gemma 3 has norms of queries and keys instead of soft caps, and one RoPE per type of layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.models.config import ModelConfig
from kvjax.models.families.family import SIZES, Family, LoadError, Settings, Source, module_sources
from kvjax.models.families.llama import LLAMA_SOURCES, QUERY_KEY_NORMS, llama_config
from kvjax.models.families.settings import (
    LAYER_TYPES,
    integer,
    optional_number,
    periodic_windows,
    positive_number,
    rope_parts,
    ropes_of_layers,
)

_DEFAULTS: Settings = {"tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1}
_ONLY: Settings = {"mlp_bias": (False,), "use_bidirectional_attention": (None, False)}
_LOOKED_UP = (*SIZES, "num_key_value_heads", "head_dim")


def _config(settings: Settings, **fields: Any) -> ModelConfig:
    return llama_config(settings, embedding_scale=integer(settings, "hidden_size") ** 0.5, norm_offset=True, **fields)


def _gemma(settings: Settings) -> ModelConfig:
    # The official checkpoints set gelu but mean its tanh approximation.
    activation = settings["hidden_act"]
    return _config({**settings, "hidden_act": "gelu_pytorch_tanh" if activation == "gelu" else activation})


def _gemma2(settings: Settings, period: int = 2) -> ModelConfig:
    """Return the config of a model with a window in all layers except one in every `period`, or by `layer_types`."""
    return _config(
        {**settings, "hidden_act": settings["hidden_activation"]},
        attention_scale=positive_number(settings, "query_pre_attn_scalar") ** -0.5,
        soft_cap=optional_number(settings, "attn_logit_softcapping"),
        logit_soft_cap=optional_number(settings, "final_logit_softcapping"),
        windows=periodic_windows(settings, period),
        post_norms=True,
    )


def _gemma3(settings: Settings) -> ModelConfig:
    _, by_type = rope_parts(settings)
    if not set(by_type) <= set(LAYER_TYPES):
        raise LoadError(f"rope_parameters must have an object for each of {', '.join(LAYER_TYPES)}, not {by_type!r}.")
    plain = {**settings, "rope_parameters": None, "rope_scaling": None}
    shape = _gemma2(plain, integer(settings, "sliding_window_pattern"))
    ropes = ropes_of_layers(settings, shape, settings["rope_local_base_freq"])
    return dataclasses.replace(shape, ropes=ropes, query_key_norms=True)


POST_NORMS = {
    "layers.attention_post_norm": "post_attention_layernorm",
    "layers.mlp_norm": "pre_feedforward_layernorm",
    "layers.mlp_post_norm": "post_feedforward_layernorm",
}
_SOURCES_2: Mapping[str, Source] = {**LLAMA_SOURCES, **module_sources("model.layers", POST_NORMS)}
_DEFAULTS_2: Settings = {**_DEFAULTS, "hidden_activation": "gelu_pytorch_tanh"}
_LOOKED_UP_2 = (*_LOOKED_UP, "query_pre_attn_scalar", "sliding_window")
FAMILIES: Mapping[str, Family] = {
    "gemma": Family(
        _gemma,
        LLAMA_SOURCES,
        {**_DEFAULTS, "hidden_act": "gelu_pytorch_tanh"},
        _ONLY,
        looked_up=_LOOKED_UP,
    ),
    "gemma2": Family(
        _gemma2,
        _SOURCES_2,
        _DEFAULTS_2,
        _ONLY,
        looked_up=(*_LOOKED_UP_2, "attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "vaultgemma": Family(
        lambda settings: dataclasses.replace(_gemma2(settings), post_norms=False),
        _SOURCES_2,
        _DEFAULTS_2,
        _ONLY,
        looked_up=(*_LOOKED_UP_2, "attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "gemma3_text": Family(
        _gemma3,
        {**_SOURCES_2, **QUERY_KEY_NORMS},
        {
            **_DEFAULTS_2,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "sliding_window_pattern": 6,
        },
        {**_ONLY, "attn_logit_softcapping": (None,)},
        looked_up=_LOOKED_UP_2,
    ),
}
