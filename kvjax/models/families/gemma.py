"""Gemma 1 to 3 (text): Llama with scaled embeddings, wider heads and norms that multiply by 1 + weight.

Gemma 2 adds norms after attention and MLP, soft caps, and a window in every other layer. Gemma 3 has norms of queries
and keys instead of soft caps, and one RoPE per type of layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from kvjax.models.config import ModelConfig
from kvjax.models.families.common import LLAMA_DEFAULTS, LLAMA_SOURCES, QUERY_KEY_NORMS, llama_config
from kvjax.models.families.family import Family, LoadError, Settings, Source
from kvjax.models.families.settings import (
    LAYER_TYPES,
    integer,
    optional_number,
    positive_number,
    read_rope,
    read_windows,
    rope_of_type,
    rope_parts,
)
from kvjax.models.families.sources import module_sources
from kvjax.rope import Rope

_DEFAULTS: Mapping[str, Any] = {
    **LLAMA_DEFAULTS,
    "vocab_size": 256_000,
    "hidden_size": 3072,
    "intermediate_size": 24_576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 8192,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_ONLY: Settings = {"mlp_bias": (False,), "use_bidirectional_attention": (None, False)}


def _shared(settings: Settings) -> ModelConfig:
    shape = llama_config(settings)
    return dataclasses.replace(shape, embedding_scale=shape.width**0.5, norm_offset=True)


def _gemma(settings: Settings) -> ModelConfig:
    # The official checkpoints set gelu but mean its tanh approximation.
    activation = settings["hidden_act"]
    return _shared({**settings, "hidden_act": "gelu_pytorch_tanh" if activation == "gelu" else activation})


GEMMA = Family(_gemma, LLAMA_SOURCES, _DEFAULTS, _ONLY)

_NORMS = {
    "layers.attention_post_norm": "post_attention_layernorm",
    "layers.mlp_norm": "pre_feedforward_layernorm",
    "layers.mlp_post_norm": "post_feedforward_layernorm",
}
_SOURCES_2: Mapping[str, Source] = {**LLAMA_SOURCES, **module_sources("model.layers", _NORMS)}
_DEFAULTS_2: Mapping[str, Any] = {
    **_DEFAULTS,
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


def _with_windows(settings: Settings, period: int) -> ModelConfig:
    """Return the config of a model with a window in all layers except one in every `period`, or by `layer_types`."""
    layers = range(integer(settings, "num_hidden_layers"))
    return dataclasses.replace(
        _shared({**settings, "hidden_act": settings["hidden_activation"]}),
        attention_scale=positive_number(settings, "query_pre_attn_scalar") ** -0.5,
        soft_cap=optional_number(settings, "attn_logit_softcapping"),
        logit_soft_cap=optional_number(settings, "final_logit_softcapping"),
        windows=read_windows(settings, [LAYER_TYPES[(index + 1) % period > 0] for index in layers]),
        post_norms=True,
    )


GEMMA2 = Family(functools.partial(_with_windows, period=2), _SOURCES_2, _DEFAULTS_2, _ONLY)


def _gemma3(settings: Settings) -> ModelConfig:
    scaling, given = rope_parts(settings)
    if not set(given) <= set(LAYER_TYPES):
        raise LoadError(f"rope_parameters must have an object for each of {', '.join(LAYER_TYPES)}, not {given!r}.")

    def rope(kind: str, theta: str, scaling: Settings) -> Rope:
        own = {
            "rope_theta": settings[theta],
            "rope_scaling": None,
            "rope_parameters": rope_of_type(given, kind, scaling),
        }
        return read_rope({**settings, **own}, integer(settings, "head_dim"))

    full = rope("full_attention", "rope_theta", scaling)
    sliding = rope("sliding_attention", "rope_local_base_freq", {})
    plain = {**settings, "rope_parameters": None, "rope_scaling": None}
    shape = _with_windows(plain, integer(settings, "sliding_window_pattern"))
    ropes = tuple(full if window is None else sliding for window in shape.windows or (None,) * shape.layers)
    return dataclasses.replace(shape, ropes=ropes, query_key_norms=True)


GEMMA3 = Family(
    _gemma3,
    {**_SOURCES_2, **QUERY_KEY_NORMS},
    {
        **_DEFAULTS_2,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    },
    {**_ONLY, "attn_logit_softcapping": (None,)},
)
