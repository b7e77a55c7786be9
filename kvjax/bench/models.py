"""Models to measure with: those that can be loaded, and random ones of given shapes."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from kvjax.model import Model, load
from kvjax.models import ModelConfig, Rope, random_weights
from kvjax.models.weights import weight_shapes

SYNTHETIC = ModelConfig(
    vocab_size=4096,
    width=1024,
    layers=8,
    heads=16,
    kv_heads=4,
    head_width=64,
    mlp_width=2816,
    max_positions=32768,
    rope=Rope(width=64),
)

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

SHAPES = {"toy": TOY, "synthetic": SYNTHETIC, "llama_7b": LLAMA_7B}


def model_named(name: str, dtype: str, revision: str | None = None, weights: Literal["int8"] | None = None) -> Model:
    """The embedded model, a checkpoint, or `synthetic`: 8 layers, width 1024, four query heads per KV head."""
    if name == "synthetic":
        if revision is not None or weights is not None:
            raise ValueError(
                "--revision and --weights are of models that are loaded, not of synthetic; leave them out."
            )
        return Model(random_weights(SYNTHETIC, jax.random.key(0), jnp.dtype(dtype)), SYNTHETIC, name)
    return load(name, dtype, revision, weights)


def random_model(config: ModelConfig, dtype: str) -> Model:
    """Random weights, drawn on the device: seven billion of them take minutes on the host."""

    @functools.partial(jax.jit, static_argnums=1)
    def draw(key: Key[Array, ""], shape: tuple[int, ...]) -> Float[Array, "..."]:
        return jax.random.normal(key, shape, jnp.dtype(dtype)) / math.sqrt(shape[-1])

    leaves, tree = jax.tree.flatten(weight_shapes(config))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    weights = [
        draw(key, leaf.shape) if len(leaf.shape) > 1 else jnp.ones(leaf.shape, dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return Model(jax.tree.unflatten(tree, weights), config, f"{config.layers} layers of width {config.width}")
