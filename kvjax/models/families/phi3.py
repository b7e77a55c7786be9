"""Phi-3: Llama with fused projections of queries, keys and values, and of the MLP's gate and up projection."""

from __future__ import annotations

from kvjax.models.config import ModelConfig
from kvjax.models.families.common import LLAMA_DEFAULTS, LLAMA_SOURCES, llama_config
from kvjax.models.families.family import Family, Settings
from kvjax.models.families.sources import fused_in_turn, gates_and_ups


def _config(settings: Settings) -> ModelConfig:
    # Older checkpoints use other names for longrope.
    named = {"su": "longrope", "yarn": "longrope"}
    ropes = {key: settings.get(key) for key in ("rope_scaling", "rope_parameters")}
    for key, rope in ropes.items():
        if isinstance(rope, dict):
            kind = rope.get("rope_type", rope.get("type", "default"))
            ropes[key] = {**rope, "rope_type": named.get(kind, kind)}
    return llama_config({**settings, **ropes}, partial=True, windowed=True)


_GATES = gates_and_ups("model.layers.{layer}.mlp.gate_up_proj.weight", axis=0)
PHI3 = Family(
    _config,
    {
        **LLAMA_SOURCES,
        **fused_in_turn("model.layers.{layer}.self_attn.qkv_proj"),
        **{f"layers.mlp.{leaf}.weight": source for leaf, source in _GATES.items()},
    },
    {
        **LLAMA_DEFAULTS,
        "vocab_size": 32_064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 32_000,
    },
    only={"attention_bias": (False,), "mlp_bias": (False,)},
)
