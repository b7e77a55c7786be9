"""SmolLM3: Llama without RoPE in every fourth layer."""

from __future__ import annotations

import dataclasses

from kvjax.models.config import ModelConfig
from kvjax.models.families.common import LLAMA_DEFAULTS, LLAMA_SOURCES, llama_config
from kvjax.models.families.family import Family, LoadError, Settings
from kvjax.models.families.settings import LAYER_TYPES, flag, integer, read_windows


def _config(settings: Settings) -> ModelConfig:
    shape = llama_config(settings)
    rotated = rotated_layers(settings, shape.layers)
    windowed = flag(settings, "use_sliding_window") and settings["sliding_window"] is not None
    return dataclasses.replace(
        shape,
        rope=None,
        ropes=tuple(shape.rope if each else None for each in rotated),
        windows=read_windows(settings, [LAYER_TYPES[bool(windowed and not each)] for each in rotated]),
    )


def rotated_layers(settings: Settings, layers: int) -> list[bool]:
    """Return whether each layer has RoPE; `no_rope_layers` has a 1 for layers with it."""
    given = settings["no_rope_layers"]
    if given is None:
        period = integer(settings, "no_rope_layer_interval")
        return [(layer + 1) % period > 0 for layer in range(layers)]
    if not isinstance(given, list) or len(given) != layers:
        raise LoadError(f"no_rope_layers must have a 0 or 1 for each of {layers} layers, not {given!r}.")
    return [bool(each) for each in given]


SMOLLM3 = Family(
    _config,
    LLAMA_SOURCES,
    {
        **LLAMA_DEFAULTS,
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "sliding_window": None,
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
    },
)
