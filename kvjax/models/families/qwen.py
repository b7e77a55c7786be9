"""Qwen2 and 3: Llama with biases of queries, keys and values (Qwen2), or with norms of queries and keys (Qwen3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.models.config import ModelConfig
from kvjax.models.families.common import LLAMA_DEFAULTS, LLAMA_SOURCES, QUERY_KEY_NORMS, llama_config
from kvjax.models.families.family import Family, LoadError, Settings
from kvjax.models.families.settings import LAYER_TYPES, flag, integer, layer_numbers, read_mixture, read_windows
from kvjax.models.families.sources import expert_sources

_DEFAULTS: Mapping[str, Any] = {
    **LLAMA_DEFAULTS,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_ONLY = {"mlp_bias": (False,)}


def _windows(settings: Settings) -> tuple[int | None, ...] | None:
    """Return the windows: with `use_sliding_window`, layers from `max_window_layers` on have one."""
    if not flag(settings, "use_sliding_window") or settings["sliding_window"] is None:
        return None
    layers, first = integer(settings, "num_hidden_layers"), settings["max_window_layers"]
    if not isinstance(first, int) or first < 0:
        raise LoadError(f"max_window_layers must be an integer from 0, not {first!r}.")
    return read_windows(settings, [LAYER_TYPES[index >= first] for index in range(layers)])


def _qwen2(settings: Settings) -> ModelConfig:
    # Its configs contain a window even if `use_sliding_window` is off.
    shape = llama_config({"output_bias": False, **settings, "attention_bias": True})
    return dataclasses.replace(shape, windows=_windows(settings))


def _qwen3(settings: Settings) -> ModelConfig:
    return dataclasses.replace(llama_config(settings), windows=_windows(settings), query_key_norms=True)


def _qwen3_moe(settings: Settings) -> ModelConfig:
    shape = llama_config(settings, windowed=flag(settings, "use_sliding_window"))
    step, only = integer(settings, "decoder_sparse_step"), layer_numbers(settings, "mlp_only_layers") or []
    dense = tuple(layer for layer in range(shape.layers) if layer in only or (layer + 1) % step)
    mixture = read_mixture(settings, "moe_intermediate_size", flag(settings, "norm_topk_prob"), dense)
    return dataclasses.replace(shape, query_key_norms=True, mixture=mixture)


QWEN2 = Family(_qwen2, LLAMA_SOURCES, _DEFAULTS, _ONLY)
QWEN3 = Family(_qwen3, {**LLAMA_SOURCES, **QUERY_KEY_NORMS}, {**_DEFAULTS, "head_dim": 128}, _ONLY)
QWEN3_MOE = Family(
    _qwen3_moe,
    {**LLAMA_SOURCES, **QUERY_KEY_NORMS, **expert_sources("model.layers.{layer}.mlp")},
    {
        **_DEFAULTS,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "norm_topk_prob": False,
    },
    _ONLY,
)
