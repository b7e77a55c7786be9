"""Cohere 2 (Command R7B and A): parallel blocks; a window and interleaved RoPE in three of four layers."""

from __future__ import annotations

from collections.abc import Mapping

from kvjax.models.config import ModelConfig
from kvjax.models.families.family import SIZES, Family, Settings
from kvjax.models.families.llama import LLAMA_SOURCES, llama_config
from kvjax.models.families.settings import integer, periodic_windows, positive_number, rotated_in_windows


def _config(settings: Settings) -> ModelConfig:
    # Heads divide the hidden state, whatever head_dim is.
    settings = {**settings, "head_dim": None, "rms_norm_eps": settings["layer_norm_eps"]}
    return rotated_in_windows(
        llama_config(
            settings,
            interleaved=True,
            norm="layer",
            parallel=True,
            shared_norm=True,
            logit_scale=positive_number(settings, "logit_scale"),
            windows=periodic_windows(settings, integer(settings, "sliding_window_pattern")),
        )
    )


FAMILIES: Mapping[str, Family] = {
    "cohere2": Family(
        _config,
        LLAMA_SOURCES,
        {
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "bos_token_id": 5,
            "eos_token_id": 255_001,
            "sliding_window_pattern": 4,
        },
        {"mlp_bias": (False,)},
        looked_up=(
            *(name for name in SIZES if name != "rms_norm_eps"),
            *("layer_norm_eps", "logit_scale", "sliding_window"),
        ),
    ),
}
