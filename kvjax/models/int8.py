"""Products with weights of 8-bit integers, in the fastest form for each platform."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8

from kvjax.models.matmul import product
from pallas_kernels.attention import wide
from pallas_kernels.common import platform_of
from pallas_kernels.quantised import digits, joined

MANY_ROWS = 64 if jax.__version_info__ < (0, 11) else None
"""Number of rows above which converting the codes is faster on a CPU; None if integer products always are."""

FEW_ROWS = 16 if jax.__version_info__ >= (0, 12) else 0
"""Number of rows up to which integer products on a CPU are faster with the codes as first operand."""

WIDE = 8192
"""Number of outputs above which products with few rows are faster in blocks."""


def product_with_codes(
    x: Float[Array, "*b in"], codes: Int8[Array, "out in"], scale: Float[Array, " out"], dtype: DTypeLike
) -> Float[Array, "*b out"]:
    """Compute x W^T for a weight of 8-bit integers with a scale for each output; sums are at least float32.

    On a CPU, one integer product multiplies the codes by two digits of each input, which are off by at most 1.6e-5 of
    the row's largest input (`pallas_kernels.quantised.digits`). Its derivatives are those of the exact product. If XLA
    converted the codes for a few rows, it would take several times as long. The product is exact with float64, with
    more than `MANY_ROWS` rows and on other platforms. `jax.vmap` maps over stacked codes.
    """
    kind, rows = jnp.promote_types(dtype, wide(x.dtype)), math.prod(x.shape[:-1])
    many = MANY_ROWS is not None and rows > MANY_ROWS
    if many or kind == jnp.float64 or platform_of(None) != "cpu":
        y = product(x, codes.astype(x.dtype), kind)
    else:
        y = _of_digits(x.reshape(rows, -1).astype(kind), codes).reshape(*x.shape[:-1], -1)
    return (y * scale).astype(dtype)


@jax.custom_jvp
def _of_digits(x: Float[Array, "n in"], codes: Int8[Array, "out in"]) -> Float[Array, "n out"]:
    rows, unit = digits(x)
    if len(x) > FEW_ROWS:
        return joined(jnp.einsum("ni,oi->no", rows, codes, preferred_element_type=jnp.int32), unit)
    blocks = math.gcd(len(codes), 16) if len(codes) > WIDE else 1
    split, repeated = codes.reshape(blocks, -1, codes.shape[1]), jnp.broadcast_to(rows, (blocks, *rows.shape))
    found = jnp.einsum("boi,bni->bon", split, repeated, preferred_element_type=jnp.int32)
    # Without the barrier XLA exchanges the operands instead of transposing the result.
    return joined(jax.lax.optimization_barrier(found.reshape(len(codes), -1)).T, unit)


@_of_digits.defjvp
def _derivative(
    inputs: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Float[Array, "n out"], Float[Array, "n out"]]:
    x, codes = inputs
    return _of_digits(x, codes), product(tangents[0], codes.astype(x.dtype))
