"""Configs and names of tensors that several families share."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from kvjax.models.config import ModelConfig
from kvjax.models.families.family import LoadError, Settings, Source
from kvjax.models.families.settings import (
    ACTIVATIONS,
    choice,
    flag,
    head_width,
    integer,
    optional_integer,
    positive_number,
    read_rope,
    special_token_ids,
)
from kvjax.models.families.sources import module_sources

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


def _common_fields(settings: Settings, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a config that every family has, given the names of their settings."""
    readers = {"norm_eps": positive_number, "activation": functools.partial(choice, choices=ACTIVATIONS)}
    return {ours: readers.get(ours, integer)(settings, theirs) for ours, theirs in names.items()} | {
        "vocab_size": integer(settings, "vocab_size"),
        "tied": flag(settings, "tie_word_embeddings"),
        "bos": next(iter(special_token_ids(settings, "bos_token_id")), None),
        "eos": special_token_ids(settings, "eos_token_id"),
    }


def llama_config(settings: Settings, *, partial: bool = False, windowed: bool = False) -> ModelConfig:
    """Return the config of a model like Llama; `partial` as in `read_rope`.

    Llama has no sliding window, even if its config sets one; `windowed` is True for families that have it.
    """
    fields = _common_fields(settings, LLAMA_NAMES)
    width, heads = fields["width"], fields["heads"]
    if settings.get("head_dim") is None and width % heads:
        raise LoadError(
            f"hidden_size {width} is not a multiple of num_attention_heads {heads}, and there is no head_dim."
        )
    head_width = optional_integer(settings, "head_dim") or width // heads
    return ModelConfig(
        **fields,
        kv_heads=optional_integer(settings, "num_key_value_heads") or heads,
        head_width=head_width,
        rope=read_rope(settings, head_width, partial=partial),
        qkv_bias=flag(settings, "attention_bias"),
        output_bias=flag(settings, "output_bias" if "output_bias" in settings else "attention_bias"),
        mlp_bias=flag(settings, "mlp_bias"),
        sliding_window=optional_integer(settings, "sliding_window") if windowed else None,
    )


def gpt_config(settings: Settings, names: Mapping[str, str], **others: Any) -> ModelConfig:
    """Return the config of a model with layer normalization, an MLP without a gate, and heads that divide the width.

    Args:
        settings: settings of the model.
        names: the family's names of the settings in `LLAMA_NAMES`. If that of `mlp_width` is None, it is 4 * `width`.
        others: further fields of the config; by default `kv_heads` is `heads` and `norm_bias` is True.
    """
    if settings[names["mlp_width"]] is None:
        settings = {**settings, names["mlp_width"]: 4 * integer(settings, names["width"])}
    fields = _common_fields(settings, names) | {
        "head_width": head_width(settings, names["width"], names["heads"]),
        "norm": "layer",
        "norm_bias": True,
        "gated_mlp": False,
    }
    return ModelConfig(**({"kv_heads": fields["heads"]} | fields | others))


GPT_NAMES: Mapping[str, str] = {
    "width": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "max_positions": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "activation": "activation_function",
    "mlp_width": "n_inner",
}
"""Names of settings in GPT-2 and GPT-J, for `gpt_config`."""
GPT_ALIASES: Mapping[str, str] = {
    LLAMA_NAMES[ours]: GPT_NAMES[ours] for ours in ("width", "layers", "heads", "max_positions")
}
LLAMA_SOURCES: Mapping[str, Source] = module_sources(
    "model.layers",
    {
        "embedding": "model.embed_tokens",
        "norm": "model.norm",
        "unembedding": "lm_head",
        "layers.attention_norm": "input_layernorm",
        "layers.mlp_norm": "post_attention_layernorm",
        "layers.query": "self_attn.q_proj",
        "layers.key": "self_attn.k_proj",
        "layers.value": "self_attn.v_proj",
        "layers.output": "self_attn.o_proj",
        "layers.mlp.gate": "mlp.gate_proj",
        "layers.mlp.up": "mlp.up_proj",
        "layers.mlp.down": "mlp.down_proj",
    },
)
QUERY_KEY_NORMS: Mapping[str, Source] = {
    "layers.query_norm.scale": Source("model.layers.{layer}.self_attn.q_norm.weight"),
    "layers.key_norm.scale": Source("model.layers.{layer}.self_attn.k_norm.weight"),
}
LLAMA_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
