"""Several hidden states of each token: alternating updates (AltUp)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from kvjax.models.config import ModelConfig, Streams
from kvjax.models.linear import Linear, Norm, normalise
from pallas_kernels.attention import wide


@struct.dataclass
class ModelStreams:
    """Maps [width width] between the first hidden state of a token and its others, before and after all layers."""

    expand: tuple[Linear, ...]
    merge: tuple[Linear, ...]

    def expanded(self, x: Float[Array, "*b width"]) -> Float[Array, "*b all"]:
        """Return all hidden states of tokens, given their embeddings."""
        return jnp.concatenate([x, *(_as_long(x, to_other(x)) for to_other in self.expand)], axis=-1)

    def merged(self, x: Float[Array, "*b all"]) -> Float[Array, "*b width"]:
        """Return the mean of all hidden states of tokens, each made as long as the first one."""
        first, *others = jnp.split(x, 1 + len(self.merge), axis=-1)
        maps = zip(self.merge, others, strict=True)
        return sum((_as_long(first, to_first(other)) for to_first, other in maps), first) / (1 + len(others))


def _as_long(like: Float[Array, "*b width"], x: Float[Array, "*b width"]) -> Float[Array, "*b width"]:
    """Return vectors in the length of others."""
    lengths, wanted = (jnp.mean(y.astype(wide(y.dtype)) ** 2, -1, keepdims=True) for y in (x, like))
    return x * jnp.sqrt(wanted / jnp.maximum(lengths, 1e-5)).astype(x.dtype)


@struct.dataclass
class LayerStreams:
    """Weights by which a layer predicts all n hidden states of a token, and corrects them by the one it computes.

    Baykal et al. (2023), Algorithm 1, with coefficients that depend on the token: `router` [n width] maps it to n
    numbers, of which `prediction` [n n n] and `correction` [n n] make those coefficients.
    """

    router_norm: Norm
    router: Linear
    prediction: Linear
    correction: Linear
    scale: Float[Array, " width"]

    def predict(self, x: Float[Array, "b t all"], config: ModelConfig) -> Float[Array, "b t n width"]:
        """Return all hidden states as linear maps of those before the layer."""
        sizes, states = _sizes(config), x.reshape(*x.shape[:2], -1, config.width)
        coefficients = self.prediction(self._routed(self.active(states, config), config))
        coefficients = coefficients.reshape(*x.shape[:2], sizes.count, sizes.count)
        return states + jnp.einsum("btji,btiw->btjw", coefficients, states)

    def active(self, states: Float[Array, "b t n width"], config: ModelConfig) -> Float[Array, "b t width"]:
        """Return the hidden state that the layer computes."""
        return states[:, :, _sizes(config).active]

    def correct(
        self, predicted: Float[Array, "b t n width"], x: Float[Array, "b t width"], config: ModelConfig
    ) -> Float[Array, "b t n width"]:
        """Return the predicted hidden states after a correction by the computed one, `x`."""
        coefficients = self.correction(self._routed(x, config)) + 1
        return predicted + coefficients[..., None] * (x - self.active(predicted, config))[:, :, None]

    def gate_input(self, states: Float[Array, "b t n width"], config: ModelConfig) -> Float[Array, "b t width"]:
        """Return the hidden state that the gate of the layer's embeddings reads."""
        x = self.active(states, config)
        return x * self.scale if _sizes(config).scaled else x

    def _routed(self, x: Float[Array, "b t width"], config: ModelConfig) -> Float[Array, "b t n"]:
        routed = self.router(normalise(self.router_norm, x, config) / config.width)
        return jnp.tanh(routed.astype(wide(x.dtype))).astype(x.dtype)


def _sizes(config: ModelConfig) -> Streams:
    assert config.streams is not None
    return config.streams


@struct.dataclass
class Laurel:
    """Learned map of low rank beside the residual connection (Menghani et al., 2024, section 2.2)."""

    left: Linear
    right: Linear
    norm: Norm

    def __call__(self, x: Float[Array, "b t width"], config: ModelConfig) -> Float[Array, "b t width"]:
        return x + normalise(self.norm, self.right(self.left(x)), config)
