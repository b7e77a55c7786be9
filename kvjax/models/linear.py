"""Linear maps and norms, the leaves of a model's weights, with products in the fastest form for each platform."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.models.config import ModelConfig
from kvjax.models.integers import Codes, integer_product, signed
from pallas_kernels.attention import wide
from pallas_kernels.op import platform_of
from pallas_kernels.quantised import digits, join_digits

FEW_ROWS = 32
"""Largest number of rows for which a CPU is faster with the weight on the left."""

HALVES = range(80_000, 560_000)
"""Weight sizes, in elements, for which XLA multiplies one row on a single CPU core although two would be faster."""

BLOCK = 1024
"""Rows of an MLP whose intermediate results fit into the caches of a CPU."""

MANY_ROWS = 64 if jax.__version_info__ < (0, 11) else None
"""Number of rows above which converting signed codes is faster on a CPU; None if integer products always are."""


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
        rows = self.weight[outputs]
        return rows if self.scale is None else signed(rows) * self.scale[outputs][..., None]

    @property
    def matrix(self) -> Float[Array, "out in"]:
        """Weight in floating point."""
        return self.weight if self.scale is None else signed(self.weight) * self.scale[..., None]


@struct.dataclass
class Norm:
    """Scale and, for layer normalization, offset; both [width], or None for norms without them."""

    scale: Float[Array, " width"] | None
    bias: Float[Array, " width"] | None = None


def normalise(norm: Norm | None, x: Float[Array, "*b width"], config: ModelConfig) -> Float[Array, "*b width"]:
    """Apply RMS or layer normalization, computed in at least float32; `norm` is None for neither scale nor offset."""
    precise = x.astype(wide(x.dtype))
    if config.norm == "layer":
        precise = precise - precise.mean(-1, keepdims=True)
    precise = precise * jax.lax.rsqrt(jnp.mean(precise**2, -1, keepdims=True) + config.norm_eps)
    if norm is None or norm.scale is None:
        return precise.astype(x.dtype)
    if config.norm_offset:
        return (precise * (1 + norm.scale.astype(precise.dtype))).astype(x.dtype)
    y = precise.astype(x.dtype) * norm.scale
    return y if norm.bias is None else y + norm.bias


def in_blocks(function: Callable[[Array], Array], x: Float[Array, "*b in"], block: int) -> Float[Array, "*b out"]:
    """Apply a row-wise function; on a CPU, apply it to blocks of rows to limit the size of its intermediate results."""
    rows = math.prod(x.shape[:-1])
    if platform_of(None) != "cpu" or rows <= block:
        return function(x)
    flat, full = x.reshape(rows, -1), rows // block * block
    y = jax.lax.map(function, flat[:full].reshape(-1, block, flat.shape[1]))
    y = y.reshape(full, -1)
    if full < rows:
        y = jnp.concatenate([y, function(flat[full:])])
    return y.reshape(*x.shape[:-1], -1)


def product(
    x: Float[Array, "*b in"], weight: Float[Array, "out in"], dtype: DTypeLike | None = None
) -> Float[Array, "*b out"]:
    """Compute x W^T. Sums and the result have `dtype`, or that of x, which must be the weight's."""
    rows, platform = math.prod(x.shape[:-1]), platform_of(None)
    if platform == "cpu":
        if x.dtype == jnp.bfloat16:
            return _of_bfloat16(x.reshape(rows, -1), weight, dtype).reshape(*x.shape[:-1], -1)
        if rows == 1 and weight.size in HALVES and weight.shape[0] % 2 == 0:
            # XLA splits a batch over cores: make one of two halves of the outputs, with the same sums.
            batch = jnp.broadcast_to(x.reshape(-1), (2, x.shape[-1]))
            halves = weight.reshape(2, -1, weight.shape[1])
            return jnp.einsum("hi,hoi->ho", batch, halves, preferred_element_type=dtype).reshape(*x.shape[:-1], -1)
        if 1 < rows <= FEW_ROWS:
            return jnp.moveaxis(jnp.einsum("oi,...i->o...", weight, x, preferred_element_type=dtype), 0, -1)
    if platform == "tpu" and rows == 1:
        # XLA would use the vector unit, which takes three to twelve times as many cycles.
        two = jnp.pad(x.reshape(1, -1), [(0, 1), (0, 0)])
        return product(two, weight, dtype)[:1].reshape(*x.shape[:-1], -1)
    return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=dtype)


def _of_bfloat16(x: Float[Array, "n in"], weight: Float[Array, "out in"], dtype: DTypeLike | None) -> Array:
    # XLA on CPU copies the weight to float32, except for two or more rows with sums in float32.
    rows = len(x)
    several = jnp.pad(x, [(0, 1), (0, 0)]) if rows == 1 else x
    y = jnp.einsum("ni,oi->no", several, weight, preferred_element_type=jnp.float32)
    return y[:rows].astype(dtype or x.dtype)


def product_with_codes(
    x: Float[Array, "*b in"],
    codes: Codes,
    scale: Float[Array, " out"],
    dtype: DTypeLike,
) -> Float[Array, "*b out"]:
    """Compute x W^T for a weight of 8-bit integers with a scale for each output; sums are at least float32.

    On a CPU, one integer product multiplies the codes by two digits of each input, which are off by at most 1.6e-5 of
    the row's largest input (`pallas_kernels.quantised.digits`). Its derivatives are those of the exact product. If XLA
    converted the codes for a few rows, it would take several times as long. The product is exact with float64, with
    more than `MANY_ROWS` rows of signed codes and on other platforms. `jax.vmap` maps over stacked codes.

    Args:
        codes: signed, or unsigned and 128 larger (`kvjax.models.integers.code_dtype`).
    """
    kind, rows = jnp.promote_types(dtype, wide(x.dtype)), math.prod(x.shape[:-1])
    is_large = MANY_ROWS is not None and rows > MANY_ROWS and codes.dtype == jnp.int8
    if is_large or kind == jnp.float64 or platform_of(None) != "cpu":
        y = product(x, signed(codes).astype(x.dtype), kind)
    else:
        y = _of_digits(x.reshape(rows, -1).astype(kind), codes).reshape(*x.shape[:-1], -1)
    return (y * scale).astype(dtype)


@jax.custom_jvp
def _of_digits(x: Float[Array, "n in"], codes: Codes) -> Float[Array, "n out"]:
    rows, unit = digits(x)
    return join_digits(integer_product(rows, codes), unit)


@_of_digits.defjvp
def _derivative(
    inputs: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Float[Array, "n out"], Float[Array, "n out"]]:
    x, codes = inputs
    return _of_digits(x, codes), product(tangents[0], signed(codes).astype(x.dtype))
