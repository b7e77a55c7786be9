"""Race decode steps of a whole model with LESS and without it: `python -m kvjax.bench kernels --step`."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import bench
from kvjax.less.kernels import init_kernels
from kvjax.model import Model
from kvjax.models import ModelConfig, Rope
from kvjax.models.weights import weight_shapes
from kvjax.policies import policy

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

MODELS = {"toy": TOY, "synthetic": bench.SYNTHETIC, "llama_7b": LLAMA_7B}


def random_model(config: ModelConfig, dtype: str) -> Model:
    """Random weights, drawn on the device: seven billion of them take minutes on the host."""

    @functools.partial(jax.jit, static_argnums=1)
    def draw(key, shape):
        return jax.random.normal(key, shape, jnp.dtype(dtype)) / math.sqrt(shape[-1])

    leaves, tree = jax.tree.flatten(weight_shapes(config))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    weights = [
        draw(key, leaf.shape) if len(leaf.shape) > 1 else jnp.ones(leaf.shape, dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return Model(jax.tree.unflatten(tree, weights), config, f"{config.layers} layers of width {config.width}")


def step(options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Decode steps of a whole model from a full cache, with LESS and without it."""
    config = MODELS[options.step_model]
    model, steps = random_model(config, options.dtype), 16
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, config.vocab_size, (options.step_batch, options.step_slots))
    kernels = init_kernels(jax.random.key(1), config)
    contenders = []
    for base in ("streaming", "h2o"):
        for name, made in ((base, policy(base)), (f"less on {base}", policy("less", base=base, kernels=kernels))):
            contender = bench.decoder(model, made, options.step_slots, tokens, steps)
            contenders.append(dataclasses.replace(contender, name=name))
    bench.race(contenders, options.repeats)
    title = (
        f"{steps} steps: {model.name}, {options.step_batch} rows, {options.step_slots} slots, {options.dtype}; {device}"
    )
    return {"title": title, "rows": bench.table(contenders, options.step_batch * steps, title)}
