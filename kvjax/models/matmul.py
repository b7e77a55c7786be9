"""Products with weights in floating point or of 8-bit integers, in the fastest form for each platform."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.models.integers import Codes, integer_product, signed
from pallas_kernels.attention import wide
from pallas_kernels.common import platform_of
from pallas_kernels.quantised import digits, join_digits

FEW_ROWS = 32
"""Largest number of rows for which a CPU is faster with the weight on the left."""

HALVES = range(80_000, 560_000)
"""Weight sizes, in elements, for which XLA multiplies one row on a single CPU core although two would be faster."""

BLOCK = 1024
"""Rows of an MLP whose intermediate results fit into the caches of a CPU."""

MANY_ROWS = 64 if jax.__version_info__ < (0, 11) else None
"""Number of rows above which converting signed codes is faster on a CPU; None if integer products always are."""


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
            # XLA copies the weight to float32, except for two or more rows with sums in float32.
            several = jnp.pad(x.reshape(rows, -1), [(0, int(rows == 1)), (0, 0)])
            y = jnp.einsum("ni,oi->no", several, weight, preferred_element_type=jnp.float32)[:rows]
            return y.astype(dtype or x.dtype).reshape(*x.shape[:-1], -1)
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
