"""Shapes of models that benchmarks compile and mostly do not run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from kvjax.evaluation import bench
from kvjax.models import ModelConfig, Rope
from kvjax.models.checkpoints.loading import locate
from kvjax.models.checkpoints.tensors import read_json
from kvjax.models.families import read_model_config

LLAMA_8B = dataclasses.replace(
    bench.SHAPES["llama_7b"],
    vocab_size=128256,
    kv_heads=8,
    mlp_width=14336,
    max_positions=8192,
    rope=Rope(width=128, theta=500_000.0),
)
"""Shape of Llama 3 8B."""

LLAMA_70B = dataclasses.replace(
    LLAMA_8B,
    width=8192,
    layers=80,
    heads=64,
    mlp_width=28672,
    max_positions=131072,
    rope=Rope(width=128, theta=500_000.0, scaling="llama3", factor=8.0),
)
"""Shape of Llama 3.1 70B."""

LLAMA_405B = dataclasses.replace(LLAMA_70B, width=16384, layers=126, heads=128, mlp_width=53248)

_, QWEN3 = read_model_config(
    dict(
        model_type="qwen3",
        vocab_size=151936,
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=3072,
        max_position_embeddings=40960,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
    )
)
"""Shape of Qwen3 0.6B."""

_, GEMMA3 = read_model_config(
    dict(
        model_type="gemma3_text",
        vocab_size=262144,
        hidden_size=640,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        intermediate_size=2048,
        max_position_embeddings=32768,
        sliding_window=512,
        rms_norm_eps=1e-6,
    )
)
"""Shape of Gemma 3 270M."""

SHAPES = bench.SHAPES | {
    "llama_8b": LLAMA_8B,
    "llama_70b": LLAMA_70B,
    "llama_405b": LLAMA_405B,
    "qwen3_0_6b": QWEN3,
    "gemma3_270m": GEMMA3,
}


def config_named(name: str) -> ModelConfig:
    """Return the shape of a model: one of `SHAPES`, of the embedded model, or of a directory with a config.json.

    Raises:
        ValueError: there is no such shape.
        LoadError: the config.json is damaged or not supported.
    """
    shape = SHAPES.get(name.replace("-", "_"))
    if shape is not None:
        return shape
    file = (locate(name, None) if name == "tiny" else Path(name)) / "config.json"
    if not file.is_file():
        raise ValueError(
            f"there is no shape {name!r}: give tiny, {', '.join(SHAPES)}, or a directory with a config.json."
        )
    return read_model_config(read_json(file))[1]
