"""Mistral: Llama with a sliding window."""

from __future__ import annotations

import functools

from kvjax.models.families.common import LLAMA_DEFAULTS, LLAMA_SOURCES, llama_config
from kvjax.models.families.family import Family

MISTRAL = Family(
    functools.partial(llama_config, windowed=True),
    LLAMA_SOURCES,
    {
        **LLAMA_DEFAULTS,
        "intermediate_size": 14_336,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    only={"attention_bias": (False,), "mlp_bias": (False,)},
)
