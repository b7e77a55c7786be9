"""Llama 1 to 3.2."""

from __future__ import annotations

from kvjax.models.families.common import LLAMA_DEFAULTS, LLAMA_SOURCES, llama_config
from kvjax.models.families.family import Family

LLAMA = Family(llama_config, LLAMA_SOURCES, {**LLAMA_DEFAULTS, "bos_token_id": 1, "eos_token_id": 2})
