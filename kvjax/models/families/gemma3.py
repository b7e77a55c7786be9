"""Gemma 3 (text): Gemma 2 with norms of queries and keys instead of soft caps, and one RoPE per type of layer."""

from __future__ import annotations

import dataclasses

from kvjax.models.config import ModelConfig
from kvjax.models.families.family import Family, LoadError, Settings
from kvjax.models.families.gemma import GEMMA_ONLY
from kvjax.models.families.gemma2 import GEMMA2_DEFAULTS, GEMMA2_SOURCES, gemma2_config
from kvjax.models.families.qwen3 import QUERY_KEY_NORMS
from kvjax.models.families.settings import LAYER_TYPES, integer, read_rope, rope_of_type, rope_parts
from kvjax.rope import Rope


def _config(settings: Settings) -> ModelConfig:
    scaling, given = rope_parts(settings)
    if not set(given) <= set(LAYER_TYPES):
        raise LoadError(f"rope_parameters must have an object for each of {', '.join(LAYER_TYPES)}, not {given!r}.")

    def rope(kind: str, theta: str, scaling: Settings) -> Rope:
        own = {
            "rope_theta": settings[theta],
            "rope_scaling": None,
            "rope_parameters": rope_of_type(given, kind, scaling),
        }
        return read_rope({**settings, **own}, integer(settings, "head_dim"))

    full = rope("full_attention", "rope_theta", scaling)
    sliding = rope("sliding_attention", "rope_local_base_freq", {})
    plain = {**settings, "rope_parameters": None, "rope_scaling": None}
    shape = gemma2_config(plain, integer(settings, "sliding_window_pattern"))
    ropes = tuple(full if window is None else sliding for window in shape.windows or (None,) * shape.layers)
    return dataclasses.replace(shape, ropes=ropes, query_key_norms=True)


GEMMA3 = Family(
    _config,
    {**GEMMA2_SOURCES, **QUERY_KEY_NORMS},
    {
        **GEMMA2_DEFAULTS,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    },
    {**GEMMA_ONLY, "attn_logit_softcapping": (None,)},
)
