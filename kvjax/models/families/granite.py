"""Granite: Llama with factors of embeddings, attention, residuals and logits."""

from __future__ import annotations

import dataclasses

from kvjax.models.config import ModelConfig
from kvjax.models.families.common import LLAMA_DEFAULTS, LLAMA_SOURCES, llama_config
from kvjax.models.families.family import Family, Settings
from kvjax.models.families.settings import positive_number


def _config(settings: Settings) -> ModelConfig:
    return dataclasses.replace(
        llama_config(settings),
        embedding_scale=positive_number(settings, "embedding_multiplier"),
        attention_scale=positive_number(settings, "attention_multiplier"),
        residual_scale=positive_number(settings, "residual_multiplier"),
        logit_scale=1 / positive_number(settings, "logits_scaling"),
    )


GRANITE = Family(
    _config,
    LLAMA_SOURCES,
    {
        **LLAMA_DEFAULTS,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
