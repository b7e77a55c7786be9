"""Models to benchmark: loaded ones, and random ones of given shapes."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Key

from kvjax.inference.sharding import placed_shapes
from kvjax.model import Model, load
from kvjax.models import ModelConfig, Rope, random_weights
from kvjax.models.integers import code_dtype, unsigned
from kvjax.models.sharding import parse_mesh, program_mesh, weight_shardings, weight_specs
from kvjax.models.weights import rounded_shapes, weight_shapes
from pallas_kernels.common import platform_of

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
"""Shapes that `kvjax bench kernels --step-model` names."""


def shaped_model(config: ModelConfig, dtype: DTypeLike, weights: Literal["int8"] | None, mesh: Mesh | None) -> Model:
    """Return a model whose weights are only shapes and shardings, to compile programs without running them."""
    shapes = weight_shapes(config, dtype)
    shapes = rounded_shapes(shapes) if weights == "int8" else shapes
    devices = None if mesh is None else program_mesh(config, mesh)
    placed = placed_shapes(weight_specs(shapes, config, devices), shapes, devices)
    return Model(placed, config, f"{config.layers} layers of width {config.width}", mesh=mesh)


def model_named(
    name: str,
    dtype: str,
    revision: str | None = None,
    weights: Literal["int8", "auto"] | None = None,
    mesh: str | None = None,
) -> Model:
    """Load a model, or make `synthetic`: 8 layers of width 1024 with four query heads per KV head."""
    if name == "synthetic":
        if revision is not None or weights is not None:
            raise ValueError("--revision and --weights apply to loaded models, not to synthetic; leave them out.")
        made, devices = random_weights(SYNTHETIC, jax.random.key(0), jnp.dtype(dtype)), None
        if mesh is not None:
            devices = parse_mesh(mesh)
            made = jax.device_put(made, weight_shardings(SYNTHETIC, devices))
        return Model(made, SYNTHETIC, name, mesh=devices)
    return load(name, dtype, revision, weights, mesh)


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
