"""Gemma 3n (text): Gemma 3 whose tokens have several hidden states, with sparse gates and layers that read others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.models.config import ModelConfig, Streams
from kvjax.models.families.family import SIZES, Family, LoadError, Settings, Source, module_sources
from kvjax.models.families.gemma import POST_NORMS
from kvjax.models.families.gemma4 import IGNORED, LAYER_EMBEDDINGS, read_layer_embeddings, sources_of
from kvjax.models.families.llama import LLAMA_SOURCES, QUERY_KEY_NORMS, llama_config
from kvjax.models.families.settings import (
    LAYER_TYPES,
    flag,
    integer,
    optional_number,
    read_layer_types,
    read_windows,
    ropes_of_layers,
)


def _mlp_widths(settings: Settings, layers: int) -> tuple[int, ...]:
    value = settings["intermediate_size"]
    if not isinstance(value, list):
        return (integer(settings, "intermediate_size"),) * layers
    if len(value) != layers:
        raise LoadError(f"intermediate_size must have a number for each of {layers} layers, not {len(value)}.")
    return tuple(integer({"intermediate_size": width}, "intermediate_size") for width in value)


def _sparsities(settings: Settings, layers: int) -> tuple[float, ...]:
    value = settings.get("activation_sparsity_pattern")
    if value is None:
        sparse = 10 if layers > 10 else 0
        return (0.95,) * sparse + (0.0,) * (layers - sparse)
    if not isinstance(value, list) or len(value) != layers or not all(0 <= fraction < 1 for fraction in value):
        raise LoadError(f"activation_sparsity_pattern must have a fraction for each of {layers} layers, not {value!r}.")
    return tuple(map(float, value))


def _gemma3n(settings: Settings) -> ModelConfig:
    layers = integer(settings, "num_hidden_layers")
    types = read_layer_types(settings, [LAYER_TYPES[(index + 1) % 5 > 0] for index in range(layers)])
    widths, active = _mlp_widths(settings, layers), settings["altup_active_idx"]
    plain: dict[str, Any] = {**settings, "rope_parameters": None, "rope_scaling": None}
    shape = llama_config(
        {**plain, "hidden_act": settings["hidden_activation"], "intermediate_size": max(widths)},
        embedding_scale=integer(settings, "hidden_size") ** 0.5,
        attention_scale=1.0,
        windows=read_windows(settings, types),
        mlp_widths=widths,
        sources=sources_of(settings, types),
        sparsities=_sparsities(settings, layers),
        layer_embeddings=read_layer_embeddings(settings),
        streams=Streams(integer(settings, "altup_num_inputs"), active, flag(settings, "altup_correct_scale")),
        laurel_rank=integer(settings, "laurel_rank"),
        post_norms=True,
        query_key_norms=True,
        value_norms=True,
        logit_soft_cap=optional_number(settings, "final_logit_softcapping"),
    )
    return dataclasses.replace(shape, ropes=ropes_of_layers(settings, shape, settings["rope_local_base_freq"]))


def _variant(config: ModelConfig) -> Mapping[str, Source]:
    count = 1 if config.streams is None else config.streams.count
    maps = {"expand": "altup_projections", "merge": "altup_unembed_projections"}
    return {
        f"streams.{leaf}.{index}.weight": Source(f"model.{name}.{index}.weight")
        for leaf, name in maps.items()
        for index in range(count - 1)
    }


_MODULES = {
    "layers.streams.router_norm": "altup.router_norm",
    "layers.streams.router": "altup.modality_router",
    "layers.streams.prediction": "altup.prediction_coefs",
    "layers.streams.correction": "altup.correction_coefs",
    "layers.laurel.left": "laurel.linear_left",
    "layers.laurel.right": "laurel.linear_right",
    "layers.laurel.norm": "laurel.post_laurel_norm",
}
FAMILIES: Mapping[str, Family] = {
    "gemma3n_text": Family(
        _gemma3n,
        {
            **LLAMA_SOURCES,
            **module_sources("model.layers", {**POST_NORMS, **_MODULES}),
            **QUERY_KEY_NORMS,
            **LAYER_EMBEDDINGS,
            "layers.streams.scale": Source("model.layers.{layer}.altup.correct_output_scale"),
        },
        {
            "tie_word_embeddings": True,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "final_logit_softcapping": 30.0,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262_144,
            "num_kv_shared_layers": 15,
            "altup_active_idx": 0,
            "altup_num_inputs": 4,
            "altup_correct_scale": True,
            "laurel_rank": 64,
        },
        variant=_variant,
        ignored=IGNORED,
        looked_up=(*SIZES, "num_key_value_heads", "head_dim", "sliding_window"),
    ),
}
