"""MLPs that every token runs through."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from kvjax.models.config import ModelConfig
from kvjax.models.linear import BLOCK, Linear, in_blocks
from pallas_kernels.attention import wide

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
"""Activation functions of MLPs without parameters, by their names in a config."""


@struct.dataclass
class Xielu:
    """Activation xIELU (Huang and Schlag, 2024): a quadratic function above 0, and an integrated ELU below it.

    f(x) = a_p x^2 + b x for x > 0, and a_n (e^min(x, eps) - 1 - x) + b x elsewhere, with a_p = softplus(alpha_p) and
    a_n = b + softplus(alpha_n).
    """

    alpha_p: Float[Array, " 1"]
    alpha_n: Float[Array, " 1"]
    beta: Float[Array, " 1"]
    eps: Float[Array, " 1"]

    def __call__(self, x: Float[Array, "*b inner"]) -> Float[Array, "*b inner"]:
        precise, of = x.astype(wide(x.dtype)), jax.tree.map(lambda array: array.astype(wide(x.dtype)), self)
        above = jax.nn.softplus(of.alpha_p) * precise**2
        below = (of.beta + jax.nn.softplus(of.alpha_n)) * (jnp.expm1(jnp.minimum(precise, of.eps)) - precise)
        return (jnp.where(precise > 0, above, below) + of.beta * precise).astype(x.dtype)


@struct.dataclass
class DenseMlp:
    """MLP that every token runs through.

    `gate` is None if it has no gate, and `activation` if its activation has no parameters.
    Gates below the quantile `sparsity` of a normal distribution, with their mean and deviation, are 0 (Gemma 3n).
    """

    gate: Linear | None
    up: Linear
    down: Linear
    activation: Xielu | None = None
    sparsity: float = struct.field(pytree_node=False, default=0.0)

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
        activation = ACTIVATIONS[config.activation] if self.activation is None else self.activation
        if self.gate is None:
            return activation(self.up(x))
        gate, up = self.gate(x), self.up(x)
        if self.sparsity:
            gate = above_quantile(gate, self.sparsity, config.spread.over_devices if config.spread.mlp else None)
        if config.clamped_swiglu is None:
            return activation(gate) * up
        slope, limit = config.clamped_swiglu
        gate = jnp.minimum(gate, limit)
        return gate * jax.nn.sigmoid(slope * gate) * (jnp.clip(up, -limit, limit) + 1)


def above_quantile(
    x: Float[Array, "*b inner"], fraction: float, total: Callable[[Array], Array] | None = None
) -> Float[Array, "*b inner"]:
    """Return what numbers exceed a quantile by, and 0 for those below; the quantile is that of a normal distribution.

    Args:
        fraction: numbers below the quantile, above 0 and below 1.
        total: function that sums over devices of which each has some of the numbers; None for a single device.
    """
    precise = x.astype(wide(x.dtype))

    def mean(numbers: Array) -> Array:
        sums, count = numbers.sum(-1, keepdims=True), jnp.full((), numbers.shape[-1], numbers.dtype)
        return sums / count if total is None else total(sums) / total(count)

    center = mean(precise)
    deviation = jnp.sqrt(mean((precise - center) ** 2))
    return jax.nn.relu(precise - (center + statistics.NormalDist().inv_cdf(fraction) * deviation)).astype(x.dtype)
