"""GLM and GLM-4: Llama with interleaved RoPE on half of each head; GLM-4 also normalizes outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvjax.models.config import ModelConfig
from kvjax.models.families.family import SIZES, Family, Settings, Source, gates_and_ups, module_sources
from kvjax.models.families.llama import LLAMA_SOURCES, llama_config


def _config(settings: Settings) -> ModelConfig:
    return llama_config({**settings, "output_bias": False}, partial=True, interleaved=True)


_GATES = gates_and_ups("model.layers.{layer}.mlp.gate_up_proj.weight", axis=0)
_SOURCES: Mapping[str, Source] = {
    **LLAMA_SOURCES,
    **{f"layers.mlp.{leaf}.weight": source for leaf, source in _GATES.items()},
}
_NORMS = {
    "layers.attention_post_norm": "post_self_attn_layernorm",
    "layers.mlp_post_norm": "post_mlp_layernorm",
}
_DEFAULTS: Settings = {
    "hidden_act": "silu",
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "eos_token_id": [151_329, 151_336, 151_338],
}
_ONLY = {"mlp_bias": (False,)}
_LOOKED_UP = (*SIZES, "num_key_value_heads", "head_dim")

FAMILIES: Mapping[str, Family] = {
    "glm": Family(_config, _SOURCES, _DEFAULTS, _ONLY, looked_up=_LOOKED_UP),
    "glm4": Family(
        lambda settings: dataclasses.replace(_config(settings), post_norms=True),
        {**_SOURCES, **module_sources("model.layers", _NORMS)},
        _DEFAULTS,
        _ONLY,
        looked_up=_LOOKED_UP,
    ),
}
