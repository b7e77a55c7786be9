"""Saving of Llama models in the format of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np

from kvjax.models.config import ModelConfig
from kvjax.models.decoder import DenseMlp, Weights
from kvjax.rope import Rope

_WRITTEN = (
    *("vocab_size", "width", "layers", "heads", "kv_heads", "head_width", "mlp_width", "max_positions"),
    *("norm_eps", "tied", "bos", "eos"),
)
"""Fields of a config that config.json stores; all others have the values of Llama."""


def tensors(weights: Weights) -> dict[str, jax.Array]:
    """Return the weights under the names of Llama in transformers."""
    named = {"model.embed_tokens.weight": weights.table.matrix, "model.norm.weight": weights.norm.scale}
    if weights.unembedding is not None:
        named["lm_head.weight"] = weights.unembedding.weight
    for i, layer in enumerate(weights.layers):
        assert layer.attention_norm is not None and layer.mlp_norm is not None
        assert isinstance(layer.mlp, DenseMlp) and layer.mlp.gate is not None
        named |= {
            f"model.layers.{i}.{name}.weight": value
            for name, value in {
                "input_layernorm": layer.attention_norm.scale,
                "self_attn.q_proj": layer.query.weight,
                "self_attn.k_proj": layer.key.weight,
                "self_attn.v_proj": layer.value.weight,
                "self_attn.o_proj": layer.output.weight,
                "post_attention_layernorm": layer.mlp_norm.scale,
                "mlp.gate_proj": layer.mlp.gate.weight,
                "mlp.up_proj": layer.mlp.up.weight,
                "mlp.down_proj": layer.mlp.down.weight,
            }.items()
        }
    return named


def write_checkpoint(weights: Weights, config: ModelConfig, directory: Path, dtype: str = "float32") -> None:
    """Write the config and weights of a Llama in the format of transformers.

    Args:
        weights: the model's weights, in any float dtype.
        config: the model's config, a Llama without biases.
        directory: directory to write to, created if it is missing.
        dtype: dtype of the tensors on disk.

    Raises:
        ValueError: if the model is not a Llama without biases and without scaled RoPE.
    """
    from safetensors.numpy import save_file

    plain = None
    if config.rope is not None:
        rope = Rope(config.head_width, config.rope.theta)
        plain = ModelConfig(**{name: getattr(config, name) for name in _WRITTEN}, rope=rope)
    if config.rope is None or config != plain:
        raise ValueError("only a Llama without biases and without scaled RoPE can be written; this model is another.")
    directory.mkdir(parents=True, exist_ok=True)
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": weights.unembedding is None,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "dtype": dtype,
    }
    (directory / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    cast = {name: np.asarray(value.astype(dtype)) for name, value in tensors(weights).items()}
    save_file(cast, directory / "model.safetensors", {"format": "pt"})
