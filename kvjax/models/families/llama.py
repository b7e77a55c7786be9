"""Llama 1 to 3.2."""

from __future__ import annotations

from kvjax.models.config import ModelConfig
from kvjax.models.families.common import LLAMA_DEFAULTS, LLAMA_SOURCES, llama_config
from kvjax.models.families.family import Family, Settings


def _config(settings: Settings) -> ModelConfig:
    # Llama has no sliding window, even if its config sets one.
    return llama_config({**settings, "sliding_window": None})


LLAMA = Family(_config, LLAMA_SOURCES, {**LLAMA_DEFAULTS, "bos_token_id": 1, "eos_token_id": 2})
