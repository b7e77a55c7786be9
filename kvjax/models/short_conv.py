"""A gated short convolution as a layer's mixer (LFM2, 2025): it sees a few tokens and keeps their inputs alone."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from kvjax.cache.layer import MixerInput
from kvjax.cache.recurrent import Columns
from kvjax.models.config import ModelConfig
from kvjax.models.linear import Linear


@struct.dataclass
class ShortConv:
    r"""Weights of a short convolution between two gates.

    .. math:: [b; c; x] = W_{expand} h, \quad y = W_{contract} (c \odot \mathrm{conv}(b \odot x))
    """

    expand: Linear
    """Maps to the gates before and after the convolution, and to its inputs."""
    contract: Linear
    taps: Float[Array, "width w"]
    """Factors of each channel, that of the oldest token first."""
    bias: Float[Array, " width"] | None = None
    """Addend of the convolution; None in models without it."""

    cache_kind: ClassVar[type[Columns]] = Columns

    def init_cache(self, tokens: MixerInput, limit: Int[Array, "b h"], slots: int) -> Columns:
        """Return a cache that has read nothing; it has no slots, whatever their limit."""
        width, taps = self.taps.shape
        return Columns(columns=jnp.zeros((len(limit), taps - 1, 1, width), tokens.hidden.dtype))

    def __call__(
        self, x: Float[Array, "b t width"], config: ModelConfig, cache: Any, tokens: MixerInput
    ) -> tuple[Float[Array, "b t width"], Any]:
        """Run tokens through the layer; padding leaves no inputs.

        Args:
            x: input of the layer, normalized.
            cache: layer cache with the method `convolve`, as `Columns` has it.
            tokens: the tokens of `x`.

        Returns:
            Outputs, and the cache afterwards.
        """
        before, after, inputs = jnp.split(self.expand(x), 3, axis=-1)
        inputs = jnp.where(tokens.reading.valid[..., None], before * inputs, 0)
        mixed, cache = cache.convolve(inputs[:, :, None], self.taps[None], tokens.reading)
        mixed = mixed[:, :, 0] if self.bias is None else mixed[:, :, 0] + self.bias.astype(mixed.dtype)
        return self.contract(after * mixed.astype(x.dtype)), cache
