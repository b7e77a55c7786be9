"""MLPs that every token runs through."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from kvjax.models.config import ModelConfig
from kvjax.models.linear import BLOCK, Linear, in_blocks

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
"""Activation functions of MLPs, by their names in a config."""


@struct.dataclass
class DenseMlp:
    """MLP that every token runs through; `gate` is None if it has no gate."""

    gate: Linear | None
    up: Linear
    down: Linear

    def __call__(self, x: Float[Array, "b t width"], config: ModelConfig) -> Float[Array, "b t width"]:
        if config.spread.mlp:
            return self.down.over(config.spread.over_devices, self.inner(x, config))
        return self.in_blocks(x, config)

    def in_blocks(self, x: Float[Array, "*b width"], config: ModelConfig) -> Float[Array, "*b width"]:
        """Apply the MLP to one block of rows after the other, with the weights that are here."""
        # 8-bit weights multiply two digits of each number.
        block = BLOCK if self.up.scale is None else BLOCK // 2
        return in_blocks(functools.partial(self.forward, config=config), x, block)

    def forward(self, x: Float[Array, "*b width"], config: ModelConfig) -> Float[Array, "*b width"]:
        """Apply the MLP to all rows at once, with the weights that are here."""
        return self.down(self.inner(x, config))

    def inner(self, x: Float[Array, "*b width"], config: ModelConfig) -> Float[Array, "*b inner"]:
        """Return the activations between the two products."""
        activation = ACTIVATIONS[config.activation]
        if self.gate is None:
            return activation(self.up(x))
        gate, up = self.gate(x), self.up(x)
        if config.clamped_swiglu is None:
            return activation(gate) * up
        slope, limit = config.clamped_swiglu
        gate = jnp.minimum(gate, limit)
        return gate * jax.nn.sigmoid(slope * gate) * (jnp.clip(up, -limit, limit) + 1)
