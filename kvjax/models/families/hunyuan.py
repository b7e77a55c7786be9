"""Hunyuan (dense): Llama whose queries and keys are normalized after RoPE."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvjax.models.config import ModelConfig
from kvjax.models.families.family import Family, Settings, module_sources
from kvjax.models.families.llama import LLAMA_DEFAULTS, LLAMA_SOURCES, llama_config
from kvjax.models.families.settings import given_rope, positive_number


def _config(settings: Settings) -> ModelConfig:
    rope = given_rope(settings)
    if rope.get("rope_type") != "dynamic" or not rope.get("alpha"):
        return llama_config(settings, query_key_norms=True, norms_after_rope=True)
    # A fixed alpha instead of the text's length: theta alpha^(width / (width - 2)).
    plain = {"rope_scaling": None, "rope_parameters": {**rope, "rope_type": "default"}}
    shape = _config({**settings, **plain})
    assert shape.rope is not None
    growth = positive_number(rope, "alpha") ** (shape.rope.width / (shape.rope.width - 2))
    return dataclasses.replace(shape, rope=dataclasses.replace(shape.rope, theta=growth * shape.rope.theta))


_NORMS = {"layers.mixer.query_norm": "self_attn.query_layernorm", "layers.mixer.key_norm": "self_attn.key_layernorm"}

FAMILIES: Mapping[str, Family] = {
    "hunyuan_v1_dense": Family(
        _config,
        {**LLAMA_SOURCES, **module_sources("model.layers", _NORMS)},
        LLAMA_DEFAULTS,
        {"mlp_bias": (False,)},
    ),
}
