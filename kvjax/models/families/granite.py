"""Granite and Granite SWA: Llama with four multipliers, and in SWA windows, learned sinks and a theta by layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from kvjax.models.config import ModelConfig
from kvjax.models.families.family import SIZES, Family, LoadError, Settings, Source
from kvjax.models.families.llama import LLAMA_DEFAULTS, LLAMA_SOURCES, llama_config
from kvjax.models.families.settings import LAYER_TYPES, positive_number, read_windows

_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def _granite(settings: Settings) -> ModelConfig:
    return llama_config(
        settings,
        embedding_scale=positive_number(settings, "embedding_multiplier"),
        attention_scale=positive_number(settings, "attention_multiplier"),
        residual_scale=positive_number(settings, "residual_multiplier"),
        logit_scale=1 / positive_number(settings, "logits_scaling"),
    )


def _granite_swa(settings: Settings) -> ModelConfig:
    """Return the config of a model with a window in three of four layers; a theta of 0 stands for no RoPE."""
    shape, thetas = _granite(settings), settings.get("layer_rope_theta")
    assert shape.rope is not None
    if thetas is None:
        thetas = [shape.rope.theta] * shape.layers
    if not isinstance(thetas, list) or not all(
        isinstance(theta, int | float) and 0 <= theta < math.inf for theta in thetas
    ):
        raise LoadError(f"layer_rope_theta must be a list of numbers from 0, not {thetas!r}.")
    return dataclasses.replace(
        shape,
        rope=None,
        ropes=tuple(dataclasses.replace(shape.rope, theta=float(theta)) if theta else None for theta in thetas),
        windows=read_windows(settings, [LAYER_TYPES[layer % 4 > 0] for layer in range(shape.layers)]),
        sinks=True,
    )


FAMILIES: Mapping[str, Family] = {
    "granite": Family(_granite, LLAMA_SOURCES, LLAMA_DEFAULTS, looked_up=(*SIZES, *_MULTIPLIERS)),
    "granite_swa": Family(
        _granite_swa,
        {**LLAMA_SOURCES, "layers.mixer.sink_logits": Source("model.layers.{layer}.self_attn.sinks")},
        {"hidden_act": "silu", "tie_word_embeddings": True, "bos_token_id": 100_257, "eos_token_id": 100_257},
        looked_up=(*SIZES, *_MULTIPLIERS, "num_key_value_heads", "sliding_window"),
    ),
}
