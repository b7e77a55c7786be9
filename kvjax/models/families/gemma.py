"""Gemma: Llama with scaled embeddings, wider heads and norms that multiply by 1 + weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.models.config import ModelConfig
from kvjax.models.families.common import LLAMA_DEFAULTS, LLAMA_SOURCES, llama_config
from kvjax.models.families.family import Family, Settings

GEMMA_DEFAULTS: Mapping[str, Any] = {
    **LLAMA_DEFAULTS,
    "vocab_size": 256_000,
    "hidden_size": 3072,
    "intermediate_size": 24_576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 8192,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
GEMMA_ONLY: Settings = {"mlp_bias": (False,), "use_bidirectional_attention": (None, False)}


def gemma_config(settings: Settings) -> ModelConfig:
    """Return the config that all versions of Gemma have in common."""
    shape = llama_config(settings)
    return dataclasses.replace(shape, embedding_scale=shape.width**0.5, norm_offset=True)


def _config(settings: Settings) -> ModelConfig:
    # The official checkpoints set gelu but mean its tanh approximation.
    activation = settings["hidden_act"]
    return gemma_config({**settings, "hidden_act": "gelu_pytorch_tanh" if activation == "gelu" else activation})


GEMMA = Family(_config, LLAMA_SOURCES, GEMMA_DEFAULTS, GEMMA_ONLY)
