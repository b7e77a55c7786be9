"""Qwen2: Llama with biases of queries, keys and values."""

from __future__ import annotations

import dataclasses

from kvjax.models.config import ModelConfig
from kvjax.models.families.common import LLAMA_DEFAULTS, LLAMA_SOURCES, llama_config
from kvjax.models.families.family import Family, Settings
from kvjax.models.families.settings import upper_windows


def _config(settings: Settings) -> ModelConfig:
    # Its configs contain a window even if `use_sliding_window` is off.
    shape = llama_config({**settings, "attention_bias": True})
    return dataclasses.replace(shape, windows=upper_windows(settings))


QWEN2 = Family(
    _config,
    LLAMA_SOURCES,
    {
        **LLAMA_DEFAULTS,
        "vocab_size": 151_936,
        "intermediate_size": 22_016,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "output_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    only={"mlp_bias": (False,)},
)
