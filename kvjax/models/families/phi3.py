"""Phi-3: Llama with fused projections of queries, keys and values, and of the MLP's gate and up projection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvjax.models.config import ModelConfig
from kvjax.models.families.common import LLAMA_DEFAULTS, LLAMA_SOURCES, llama_config
from kvjax.models.families.family import Family, Settings, Shape, Source


def _config(settings: Settings) -> ModelConfig:
    # Older checkpoints use other names for longrope.
    named = {"su": "longrope", "yarn": "longrope"}
    ropes = {key: settings.get(key) for key in ("rope_scaling", "rope_parameters")}
    for key, rope in ropes.items():
        if isinstance(rope, dict):
            kind = rope.get("rope_type", rope.get("type", "default"))
            ropes[key] = {**rope, "rope_type": named.get(kind, kind)}
    return llama_config({**settings, **ropes}, partial=True)


def _queries_keys_values(config: ModelConfig) -> Sequence[int]:
    return config.heads * config.head_width, config.kv_heads * config.head_width, config.kv_heads * config.head_width


def _gate_up(config: ModelConfig) -> Sequence[int]:
    return config.mlp_width, config.mlp_width


def _part(name: str, rows: Callable[[ModelConfig], Sequence[int]], index: int) -> Source:
    """Return the source of one of several maps concatenated in one tensor; `rows` gives the outputs of each."""

    def whole(shape: Shape, config: ModelConfig) -> Shape:
        return sum(rows(config)), *shape[1:]

    def read(tensor: np.ndarray, config: ModelConfig) -> np.ndarray:
        start = sum(rows(config)[:index])
        return tensor[start : start + rows(config)[index]]

    return Source(f"model.layers.{{layer}}.{name}.weight", whole, read)


_FUSED: Mapping[str, Source] = {
    f"layers.{leaf}.weight": _part(name, rows, index)
    for name, rows, leaves in (
        ("self_attn.qkv_proj", _queries_keys_values, ("query", "key", "value")),
        ("mlp.gate_up_proj", _gate_up, ("mlp.gate", "mlp.up")),
    )
    for index, leaf in enumerate(leaves)
}
PHI3 = Family(
    _config,
    {**LLAMA_SOURCES, **_FUSED},
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
