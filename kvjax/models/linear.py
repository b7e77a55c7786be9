"""Linear maps and norms, the leaves of a model's weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.models.config import ModelConfig
from kvjax.models.matmul import Codes, product, product_with_codes, signed
from pallas_kernels.attention import wide


@struct.dataclass
class Linear:
    """Linear map in the layout of checkpoints: weight [out, in], bias [out] or None.

    A weight of 8-bit integers, signed or unsigned, has a scale [out] in float32 that multiplies the product.
    """

    weight: Float[Array, "out in"] | Codes
    bias: Float[Array, " out"] | None = None
    scale: Float[Array, " out"] | None = None

    def __call__(self, x: Float[Array, "*b in"]) -> Float[Array, "*b out"]:
        y = self.product(x, x.dtype) if self.scale is not None else product(x, self.weight)
        return y if self.bias is None else y + self.bias

    def over(
        self, total: Callable[[Float[Array, "*b out"]], Float[Array, "*b out"]], x: Float[Array, "*b in"]
    ) -> Float[Array, "*b out"]:
        """Apply the map to this device's shard of the inputs; `total` sums over devices."""
        y = total(dataclasses.replace(self, bias=None)(x))
        return y if self.bias is None else y + self.bias

    def product(self, x: Float[Array, "*b in"], dtype: DTypeLike) -> Float[Array, "*b out"]:
        """Apply the map without its bias and return the result in `dtype`."""
        if self.scale is not None:
            return product_with_codes(x, self.weight, self.scale, dtype)
        return product(x, self.weight.astype(x.dtype), jnp.promote_types(dtype, wide(x.dtype))).astype(dtype)

    def rows(self, outputs: Int[Array, "*b"]) -> Float[Array, "*b in"]:
        """Return rows of the weight in floating point."""
        rows = signed(self.weight[outputs])
        return rows if self.scale is None else rows * self.scale[outputs][..., None]

    @property
    def matrix(self) -> Float[Array, "out in"]:
        """Weight in floating point."""
        return self.weight if self.scale is None else signed(self.weight) * self.scale[..., None]


@struct.dataclass
class Norm:
    """Scale and, for layer normalization, offset; both [width]."""

    scale: Float[Array, " width"]
    bias: Float[Array, " width"] | None = None


def normalise(norm: Norm | None, x: Float[Array, "*b width"], config: ModelConfig) -> Float[Array, "*b width"]:
    """Apply RMS or layer normalization, computed in at least float32; `norm` is None for neither scale nor offset."""
    precise = x.astype(wide(x.dtype))
    if config.norm == "layer":
        precise = precise - precise.mean(-1, keepdims=True)
    precise = precise * jax.lax.rsqrt(jnp.mean(precise**2, -1, keepdims=True) + config.norm_eps)
    if norm is None:
        return precise.astype(x.dtype)
    if config.norm_offset:
        return (precise * (1 + norm.scale.astype(precise.dtype))).astype(x.dtype)
    y = precise.astype(x.dtype) * norm.scale
    return y if norm.bias is None else y + norm.bias
