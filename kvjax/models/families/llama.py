"""Llama 1 to 3.2, SmolLM3, Phi-3 and Phi-4-mini, Arcee, ERNIE 4.5 (dense) and Seed-OSS: they differ in a few places."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from kvjax.models.config import ModelConfig
from kvjax.models.families.family import (
    SIZES,
    Family,
    LoadError,
    Settings,
    Source,
    fused_in_turn,
    gates_and_ups,
    module_sources,
)
from kvjax.models.families.settings import (
    ACTIVATIONS,
    LAYER_TYPES,
    choice,
    flag,
    integer,
    optional_integer,
    positive_number,
    read_rope,
    read_windows,
    special_token_ids,
)

LLAMA_NAMES: Mapping[str, str] = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "mlp_width": "intermediate_size",
}
"""Names in Llama of the settings that every family has."""


def common_fields(settings: Settings, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a config that every family has, given the names of their settings."""
    readers = {"norm_eps": positive_number, "activation": functools.partial(choice, choices=ACTIVATIONS)}
    return {field: readers.get(field, integer)(settings, setting) for field, setting in names.items()} | {
        "vocab_size": integer(settings, "vocab_size"),
        "tied": flag(settings, "tie_word_embeddings"),
        "bos": next(iter(special_token_ids(settings, "bos_token_id")), None),
        "eos": special_token_ids(settings, "eos_token_id"),
    }


def llama_config(
    settings: Settings, *, partial: bool = False, interleaved: bool = False, windowed: bool = False, **overrides: Any
) -> ModelConfig:
    """Return the config of a model like Llama.

    Args:
        settings: settings of the model.
        partial: as in `read_rope`.
        interleaved: True if RoPE rotates neighboring dimensions.
        windowed: True if the family has a sliding window; Llama has none, even if its config sets one.
        overrides: further fields of the config.
    """
    fields = common_fields(settings, LLAMA_NAMES)
    width, heads = fields["width"], fields["heads"]
    if settings.get("head_dim") is None and width % heads:
        raise LoadError(
            f"hidden_size {width} is not a multiple of num_attention_heads {heads}, and there is no head_dim."
        )
    head_width = optional_integer(settings, "head_dim") or width // heads
    fields |= {
        "kv_heads": optional_integer(settings, "num_key_value_heads") or heads,
        "head_width": head_width,
        "rope": dataclasses.replace(read_rope(settings, head_width, partial=partial), interleaved=interleaved),
        "qkv_bias": flag(settings, "attention_bias"),
        "output_bias": flag(settings, "output_bias" if "output_bias" in settings else "attention_bias"),
        "mlp_bias": flag(settings, "mlp_bias"),
        "sliding_window": optional_integer(settings, "sliding_window") if windowed else None,
    }
    return ModelConfig(**(fields | overrides))


LLAMA_SOURCES: Mapping[str, Source] = module_sources(
    "model.layers",
    {
        "embedding": "model.embed_tokens",
        "norm": "model.norm",
        "unembedding": "lm_head",
        "layers.attention_norm": "input_layernorm",
        "layers.mlp_norm": "post_attention_layernorm",
        "layers.mixer.query": "self_attn.q_proj",
        "layers.mixer.key": "self_attn.k_proj",
        "layers.mixer.value": "self_attn.v_proj",
        "layers.mixer.output": "self_attn.o_proj",
        "layers.mlp.gate": "mlp.gate_proj",
        "layers.mlp.up": "mlp.up_proj",
        "layers.mlp.down": "mlp.down_proj",
    },
)
QUERY_KEY_NORMS: Mapping[str, Source] = {
    "layers.mixer.query_norm.scale": Source("model.layers.{layer}.self_attn.q_norm.weight"),
    "layers.mixer.key_norm.scale": Source("model.layers.{layer}.self_attn.k_norm.weight"),
}
LLAMA_DEFAULTS: Settings = {"hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2}
LLAMA = Family(llama_config, LLAMA_SOURCES, LLAMA_DEFAULTS)


def _smollm3(settings: Settings) -> ModelConfig:
    """Return the config of a Llama without RoPE in every fourth layer."""
    shape, rotated = llama_config(settings), rotated_layers(settings)
    windowed = flag(settings, "use_sliding_window") and settings.get("sliding_window") is not None
    return dataclasses.replace(
        shape,
        rope=None,
        ropes=tuple(shape.rope if has_rope else None for has_rope in rotated),
        windows=read_windows(settings, [LAYER_TYPES[windowed and not has_rope] for has_rope in rotated]),
    )


def rotated_layers(settings: Settings) -> list[bool]:
    """Return whether each layer has RoPE; `no_rope_layers` has a 1 for layers with it."""
    entries, layers = settings.get("no_rope_layers"), integer(settings, "num_hidden_layers")
    if entries is None:
        period = integer(settings, "no_rope_layer_interval")
        return [(layer + 1) % period > 0 for layer in range(layers)]
    if not isinstance(entries, list) or len(entries) != layers:
        raise LoadError(f"no_rope_layers must have a 0 or 1 for each of {layers} layers, not {entries!r}.")
    return [bool(entry) for entry in entries]


def _phi3(settings: Settings) -> ModelConfig:
    # Older checkpoints use other names for longrope.
    renames = {"su": "longrope", "yarn": "longrope"}
    ropes = {key: settings.get(key) for key in ("rope_scaling", "rope_parameters")}
    for key, rope in ropes.items():
        if isinstance(rope, dict):
            kind = rope.get("rope_type", rope.get("type", "default"))
            ropes[key] = {**rope, "rope_type": renames.get(kind, kind)}
    return llama_config({**settings, **ropes}, partial=True, windowed=True)


def _ernie(settings: Settings) -> ModelConfig:
    has_biases = flag(settings, "use_bias")
    biases = {"attention_bias": has_biases, "output_bias": has_biases, "mlp_bias": has_biases}
    return llama_config({**settings, **biases}, interleaved=True)


_GATES = gates_and_ups("model.layers.{layer}.mlp.gate_up_proj.weight", axis=0)
FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,
    "smollm3": Family(
        _smollm3,
        LLAMA_SOURCES,
        {
            "hidden_act": "silu",
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
            "bos_token_id": 128_000,
            "eos_token_id": 128_001,
        },
        looked_up=(*SIZES, "num_key_value_heads"),
    ),
    "arcee": Family(
        functools.partial(llama_config, gated_mlp=False),
        LLAMA_SOURCES,
        {"hidden_act": "relu2", "bos_token_id": 128_000, "eos_token_id": 128_001},
    ),
    "ernie4_5": Family(
        _ernie,
        LLAMA_SOURCES,
        {**LLAMA_DEFAULTS, "rope_theta": 500_000.0, "tie_word_embeddings": True},
        looked_up=(*SIZES, "num_key_value_heads", "head_dim"),
    ),
    "seed_oss": Family(
        lambda settings: llama_config({**settings, "output_bias": flag(settings, "attention_out_bias")}),
        LLAMA_SOURCES,
        {"hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 2, "attention_bias": True},
        looked_up=(*SIZES, "num_key_value_heads", "head_dim"),
    ),
    "phi3": Family(
        _phi3,
        {
            **LLAMA_SOURCES,
            **fused_in_turn("model.layers.{layer}.self_attn.qkv_proj"),
            **{f"layers.mlp.{leaf}.weight": source for leaf, source in _GATES.items()},
        },
        {"hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 32_000},
        only={"attention_bias": (False,), "mlp_bias": (False,)},
        looked_up=(*SIZES, "original_max_position_embeddings"),
    ),
}
