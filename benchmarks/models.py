"""Shapes of models that benchmarks compile, and models of these shapes with random weights."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Key

from kvjax.evaluation.bench import SYNTHETIC
from kvjax.inference.sharding import placed_shapes
from kvjax.model import Model
from kvjax.models import ModelConfig, Rope
from kvjax.models.checkpoints.locate import locate
from kvjax.models.checkpoints.tensors import read_json
from kvjax.models.families import read_model_config
from kvjax.models.integers import code_dtype, unsigned
from kvjax.models.sharding import program_mesh, weight_specs
from kvjax.models.weights import rounded_shapes, weight_shapes
from pallas_kernels.common import platform_of

LLAMA_7B = ModelConfig(
    vocab_size=32000,
    width=4096,
    layers=32,
    heads=32,
    kv_heads=32,
    head_width=128,
    mlp_width=11008,
    max_positions=4096,
    rope=Rope(width=128),
)

TOY = dataclasses.replace(
    LLAMA_7B,
    vocab_size=512,
    width=256,
    layers=2,
    heads=4,
    kv_heads=4,
    head_width=64,
    mlp_width=704,
    rope=Rope(width=64),
)

LLAMA_8B = dataclasses.replace(
    LLAMA_7B,
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

SHAPES = {
    "toy": TOY,
    "synthetic": SYNTHETIC,
    "llama_7b": LLAMA_7B,
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


def shaped_model(config: ModelConfig, dtype: DTypeLike, weights: Literal["int8"] | None, mesh: Mesh | None) -> Model:
    """Return a model whose weights are only shapes and shardings, to compile programs without running them."""
    shapes = weight_shapes(config, dtype)
    shapes = rounded_shapes(shapes) if weights == "int8" else shapes
    devices = None if mesh is None else program_mesh(config, mesh)
    placed = placed_shapes(weight_specs(shapes, config, devices), shapes, devices)
    return Model(placed, config, f"{config.layers} layers of width {config.width}", mesh=mesh)


def random_model(
    config: ModelConfig, dtype: str, weights: Literal["int8"] | None = None, mesh: Mesh | None = None
) -> Model:
    """Return a model with random weights, drawn on the devices because drawing billions on the host takes minutes."""
    shaped = shaped_model(config, dtype, weights, mesh)

    @functools.partial(jax.jit, static_argnums=1)
    def draw(key: Key[Array, ""], leaf: jax.ShapeDtypeStruct) -> Array:
        if leaf.dtype == jnp.int8:
            made = jax.random.randint(key, leaf.shape, -127, 128, jnp.int8)
            made = made if code_dtype(platform_of(None)) == jnp.int8 else unsigned(made)
        elif len(leaf.shape) > 1:
            made = jax.random.normal(key, leaf.shape, leaf.dtype) / math.sqrt(leaf.shape[-1])
        else:
            made = jnp.full(leaf.shape, 1.0 / config.width if leaf.dtype != dtype else 1.0, leaf.dtype)
        return made if leaf.sharding is None else jax.lax.with_sharding_constraint(made, leaf.sharding)

    leaves, tree = jax.tree.flatten(shaped.weights)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawn = [draw(key, leaf) for key, leaf in zip(keys, leaves, strict=True)]
    return Model(jax.tree.unflatten(tree, drawn), config, shaped.name, mesh=mesh)
