"""LFM2, LFM2 MoE and LFM3: norms of queries and keys, and short convolutions in place of attention in many layers.

LFM3 also normalizes outputs, multiplies each head's output by a gate, and has a window in half of the other layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.models.config import ModelConfig, ShortConvolution
from kvjax.models.families.family import (
    SIZES,
    Family,
    LoadError,
    Settings,
    Source,
    depthwise,
    expert_sources,
    module_sources,
)
from kvjax.models.families.llama import QUERY_KEY_NORMS, llama_config
from kvjax.models.families.settings import (
    flag,
    integer,
    layer_numbers,
    positive_number,
    read_layer_types,
    read_mixture,
    ropes_of_layers,
)

_LAYER_TYPES = ("conv", "full_attention")


def _config(settings: Settings, types: Sequence[str], **fields: Any) -> ModelConfig:
    layers = tuple(layer for layer, kind in enumerate(types) if kind == "conv")
    convolution = ShortConvolution(layers, integer(settings, "conv_L_cache"), flag(settings, "conv_bias"))
    return llama_config(
        {**settings, "rms_norm_eps": settings["norm_eps"]},
        query_key_norms=True,
        short_conv=convolution if layers else None,
        **fields,
    )


def _lfm2(settings: Settings) -> ModelConfig:
    layers, attending = integer(settings, "num_hidden_layers"), layer_numbers(settings, "full_attn_idxs")
    default = [_LAYER_TYPES[attending is None or layer in attending] for layer in range(layers)]
    return _config(
        {**settings, "intermediate_size": _inner(settings)}, read_layer_types(settings, default, _LAYER_TYPES)
    )


def _inner(settings: Settings) -> int:
    """Return the inner size of MLPs: two thirds of the stated one, by default, rounded up."""
    inner = integer(settings, "intermediate_size")
    if not flag(settings, "block_auto_adjust_ff_dim"):
        return inner
    inner = int(2 * inner / 3)
    if settings["block_ffn_dim_multiplier"] is None:
        return inner
    multiple = integer(settings, "block_multiple_of")
    return -(-int(positive_number(settings, "block_ffn_dim_multiplier") * inner) // multiple) * multiple


def _lfm2_moe(settings: Settings) -> ModelConfig:
    dense, layers = settings["num_dense_layers"], integer(settings, "num_hidden_layers")
    if not isinstance(dense, int) or not 0 <= dense < layers:
        raise LoadError(
            f"num_dense_layers must be an integer from 0 and below num_hidden_layers {layers}, not {dense!r}."
        )
    if settings.get("layer_types") is None:
        raise LoadError("layer_types is missing; it must name the type of each layer, conv or full_attention.")
    mixture = read_mixture(
        settings,
        "moe_intermediate_size",
        renormalised=flag(settings, "norm_topk_prob"),
        dense_layers=tuple(range(dense)),
        probability="sigmoid",
        scale=positive_number(settings, "routed_scaling_factor"),
        selection_bias=flag(settings, "use_expert_bias"),
    )
    return _config(settings, read_layer_types(settings, ["conv"] * layers, _LAYER_TYPES), mixture=mixture)


def _lfm3(settings: Settings) -> ModelConfig:
    layers, kinds = integer(settings, "num_hidden_layers"), ("conv", "sliding_attention", "full_attention")
    default = ["full_attention" if i % 4 == 2 else kinds[i % 4 == 0 and i > 0] for i in range(layers)]
    types = read_layer_types(settings, default, kinds)
    shape = _config(
        {**settings, "rope_parameters": None},
        types,
        post_norms=flag(settings, "use_sandwich_norm"),
        output_gate="head" if flag(settings, "use_attention_gate") else None,
        windows=tuple(integer(settings, "sliding_window") if kind == kinds[1] else None for kind in types),
    )
    parameters = {**settings, "rope_parameters": settings.get("rope_parameters") or _ROPES}
    return dataclasses.replace(shape, rope=None, ropes=ropes_of_layers(parameters, shape, 10_000.0))


_ROPES: Settings = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}
_LAYER, _MAPS = "model.layers.{layer}", {"gate": "w1", "up": "w3", "down": "w2"}
_SOURCES: Mapping[str, Source] = module_sources(
    "model.layers",
    {
        "embedding": "model.embed_tokens",
        "norm": "model.embedding_norm",
        "unembedding": "lm_head",
        "layers.attention_norm": "operator_norm",
        "layers.mlp_norm": "ffn_norm",
        "layers.mixer.query": "self_attn.q_proj",
        "layers.mixer.key": "self_attn.k_proj",
        "layers.mixer.value": "self_attn.v_proj",
        "layers.mixer.output": "self_attn.out_proj",
        "layers.mixer.query_norm": "self_attn.q_layernorm",
        "layers.mixer.key_norm": "self_attn.k_layernorm",
        "layers.mixer.expand": "conv.in_proj",
        "layers.mixer.contract": "conv.out_proj",
        **{f"layers.mlp.{leaf}": f"feed_forward.{name}" for leaf, name in _MAPS.items()},
    },
)


_MIXERS: Mapping[str, Source] = {
    "layers.mixer.taps": depthwise(f"{_LAYER}.conv.conv.weight"),
    "layers.mixer.bias": Source(f"{_LAYER}.conv.conv.bias"),
}
_DEFAULTS: Settings = {
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}
_SHARED = (
    *(name for name in SIZES if name != "rms_norm_eps"),
    *("num_key_value_heads", "norm_eps", "conv_L_cache", "conv_bias"),
)
_ALIASES = {"tie_embedding": "tie_word_embeddings"}

FAMILIES: Mapping[str, Family] = {
    "lfm2": Family(
        _lfm2,
        {**_SOURCES, **_MIXERS},
        _DEFAULTS,
        aliases={**_ALIASES, "block_ff_dim": "intermediate_size"},
        looked_up=(*_SHARED, "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"),
    ),
    "lfm3": Family(
        _lfm3,
        {
            **_SOURCES,
            **_MIXERS,
            **QUERY_KEY_NORMS,
            **module_sources(
                "model.layers",
                {
                    "layers.attention_post_norm": "post_operator_norm",
                    "layers.mlp_post_norm": "post_ffn_norm",
                    "layers.mixer.output": "self_attn.o_proj",
                    "layers.mixer.gate": "self_attn.gate_proj",
                },
            ),
        },
        {**_DEFAULTS, "bos_token_id": 124_894, "eos_token_id": 124_900},
        aliases={"rms_norm_eps": "norm_eps"},
        looked_up=(*_SHARED, "head_dim", "sliding_window", "use_sandwich_norm", "use_attention_gate", "attention_bias"),
    ),
    "lfm2_moe": Family(
        _lfm2_moe,
        {
            **_SOURCES,
            **_MIXERS,
            **expert_sources(f"{_LAYER}.feed_forward", ("w1", "w3", "w2")),
            "layers.mlp.selection_bias": Source(f"{_LAYER}.feed_forward.expert_bias"),
        },
        _DEFAULTS,
        aliases=_ALIASES,
        looked_up=(
            *(*_SHARED, "moe_intermediate_size", "num_dense_layers", "num_experts", "num_experts_per_tok"),
            *("use_expert_bias", "routed_scaling_factor", "norm_topk_prob"),
        ),
    ),
}
