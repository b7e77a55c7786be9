"""Mistral, Ministral 3 and Mixtral: Llama with a sliding window.

Ministral 3 has YaRN, and queries that grow with their positions. Mixtral has a mixture of experts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from kvjax.models.config import ModelConfig, QueryGrowth
from kvjax.models.families.family import EXPERTS, SIZES, Family, Settings, expert_sources
from kvjax.models.families.llama import LLAMA_DEFAULTS, LLAMA_SOURCES, llama_config
from kvjax.models.families.settings import given_rope, integer, positive_number, read_mixture, with_default_rope

_ONLY = {"attention_bias": (False,), "mlp_bias": (False,)}
_LOOKED_UP = (*SIZES, "num_key_value_heads")
_ROPE: Settings = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "llama_4_scaling_beta": 0.1,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def _ministral3(settings: Settings) -> ModelConfig:
    settings = with_default_rope(settings, _ROPE)
    shape, rope = llama_config(settings, windowed=True), given_rope(settings)
    if not rope.get("llama_4_scaling_beta"):
        return shape
    slope, length = positive_number(rope, "llama_4_scaling_beta"), integer(rope, "original_max_position_embeddings")
    return dataclasses.replace(shape, query_growth=QueryGrowth(slope, length))


FAMILIES: Mapping[str, Family] = {
    "mistral": Family(
        functools.partial(llama_config, windowed=True),
        LLAMA_SOURCES,
        LLAMA_DEFAULTS,
        _ONLY,
        looked_up=(*_LOOKED_UP, "sliding_window"),
    ),
    "ministral3": Family(
        _ministral3,
        LLAMA_SOURCES,
        LLAMA_DEFAULTS,
        _ONLY,
        looked_up=(*_LOOKED_UP, "head_dim"),
    ),
    "mixtral": Family(
        lambda settings: llama_config(settings, windowed=True, mixture=read_mixture(settings)),
        {**LLAMA_SOURCES, **expert_sources("model.layers.{layer}.block_sparse_moe", ("w1", "w3", "w2"))},
        {**LLAMA_DEFAULTS, "rope_theta": 1_000_000.0},
        _ONLY,
        aliases={"num_experts": "num_local_experts"},
        looked_up=(*_LOOKED_UP, *EXPERTS),
    ),
}
