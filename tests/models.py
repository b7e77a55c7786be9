"""Small models for everybody's tests: random weights without torch, random checkpoints with it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.models import Model, ModelConfig, Rope, random_weights


def small_config(heads: int, kv_heads: int, **changes: object) -> ModelConfig:
    """Two layers of width 32 over 64 tokens, like Llama unless changed."""
    settings: dict = dict(
        vocab_size=64,
        width=32,
        layers=2,
        heads=heads,
        kv_heads=kv_heads,
        head_width=8,
        mlp_width=48,
        max_positions=4096,
    )
    return ModelConfig(**(settings | dict(rope=Rope(width=8)) | changes))


MHA = small_config(4, 4)
GQA = small_config(4, 2)
MQA = small_config(4, 1)


def random_model(config: ModelConfig, seed: int = 0, dtype: DTypeLike = jnp.float32) -> Model:
    """A model with random weights and no tokenizer."""
    return Model(random_weights(config, jax.random.key(seed), dtype), config, name="random")
