"""Qwen2 and 3, Qwen3 MoE: Llama with biases of queries, keys and values (2), or norms of queries and keys (3)."""

from __future__ import annotations

from collections.abc import Mapping

from kvjax.models.config import ModelConfig
from kvjax.models.families.family import SIZES, Family, LoadError, Settings, expert_sources
from kvjax.models.families.llama import LLAMA_SOURCES, QUERY_KEY_NORMS, llama_config
from kvjax.models.families.settings import LAYER_TYPES, flag, integer, layer_numbers, read_mixture, read_windows

_DEFAULTS: Settings = {"hidden_act": "silu", "sliding_window": 4096, "max_window_layers": 28}
_ONLY = {"mlp_bias": (False,)}
_LOOKED_UP = (*SIZES, "num_key_value_heads")


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
    biases = {"output_bias": False, **settings, "attention_bias": True}
    return llama_config(biases, windows=_windows(settings))


def _qwen3_moe(settings: Settings) -> ModelConfig:
    step, only = integer(settings, "decoder_sparse_step"), layer_numbers(settings, "mlp_only_layers") or []
    layers = range(integer(settings, "num_hidden_layers"))
    return llama_config(
        settings,
        windowed=flag(settings, "use_sliding_window"),
        query_key_norms=True,
        mixture=read_mixture(
            settings,
            "moe_intermediate_size",
            renormalised=flag(settings, "norm_topk_prob"),
            dense_layers=tuple(layer for layer in layers if layer in only or (layer + 1) % step),
        ),
    )


FAMILIES: Mapping[str, Family] = {
    "qwen2": Family(_qwen2, LLAMA_SOURCES, _DEFAULTS, _ONLY, looked_up=_LOOKED_UP),
    "qwen3": Family(
        lambda settings: llama_config(settings, windows=_windows(settings), query_key_norms=True),
        {**LLAMA_SOURCES, **QUERY_KEY_NORMS},
        _DEFAULTS,
        _ONLY,
        looked_up=(*_LOOKED_UP, "head_dim"),
    ),
    "qwen3_moe": Family(
        _qwen3_moe,
        {**LLAMA_SOURCES, **QUERY_KEY_NORMS, **expert_sources("model.layers.{layer}.mlp")},
        {**_DEFAULTS, "decoder_sparse_step": 1},
        _ONLY,
        aliases={"num_local_experts": "num_experts"},
        looked_up=(*_LOOKED_UP, "moe_intermediate_size", "num_experts", "num_experts_per_tok"),
    ),
}
