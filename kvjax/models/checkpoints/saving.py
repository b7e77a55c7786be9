"""Saving of Llama models in the format of transformers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Weights
from kvjax.models.families.llama import LLAMA, LLAMA_NAMES
from kvjax.models.linear import Linear
from kvjax.models.weights import leaf_name
from kvjax.rope import Rope

_WRITTEN: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    **{field: setting for field, setting in LLAMA_NAMES.items() if field != "activation"},
    "kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "tied": "tie_word_embeddings",
    "bos": "bos_token_id",
    "eos": "eos_token_id",
}
"""Fields of a config that config.json stores, by their names there; all others have the values of Llama."""


def write_checkpoint(weights: Weights, config: ModelConfig, directory: Path, dtype: str = "float32") -> None:
    """Write the config and weights of a Llama in the format of transformers.

    Args:
        weights: the model's weights; those of 8-bit integers are written in floating point.
    """
    rope = config.rope and Rope(config.head_width, config.rope.theta)
    if rope is None or config != ModelConfig(**{name: getattr(config, name) for name in _WRITTEN}, rope=rope):
        raise ValueError("only a Llama without biases and without scaled RoPE can be written; this model is another.")
    if weights.embedding is None:
        weights = dataclasses.replace(weights, embedding=weights.table.matrix, unembedding=None)
    directory.mkdir(parents=True, exist_ok=True)
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{setting: getattr(config, field) for field, setting in _WRITTEN.items()},
        "tie_word_embeddings": weights.unembedding is None,
        "eos_token_id": list(config.eos) or None,
        "pad_token_id": 1,
        "hidden_act": "silu",
        "rope_theta": rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.theta},
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": dtype,
    }
    (directory / "config.json").write_text(json.dumps(described, indent=2) + "\n")

    def floats(node: Any) -> Any:
        return Linear(node.matrix) if isinstance(node, Linear) else node

    weights = jax.tree.map(floats, weights, is_leaf=lambda node: isinstance(node, Linear))
    tensors = {LLAMA.source(leaf_name(path)).name: leaf for path, leaf in jax.tree.leaves_with_path(weights)}
    cast = {name: np.asarray(leaf.astype(dtype)) for name, leaf in tensors.items()}
    save_file(cast, directory / "model.safetensors", {"format": "pt"})
