"""Contractions with codes in XLA: scales are applied to the logits and the weights, so no number is decoded.

On `cpu` and `tpu`, integer products multiply codes by two int8 digits of the other side's rows. On `gpu`, codes are
converted to the queries' dtype inside the product. With float64, which requires exactness, they are decoded, and so are
other stored forms.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer, Num

from pallas_kernels.attention import wide
from pallas_kernels.operands import Encoded, LazyRope, Operand, Quantised

LOW = 254
"""Units of the low digit in one unit of the high digit, which is off by half a unit at most."""


def digits(x: Float[Array, "*b n d"]) -> tuple[Int[Array, "*b m d"], Float[Array, "*b n 1"]]:
    """Return rows of numbers as twice as many int8 rows, high digits before low ones, and each row's unit.

    Two digits are off by at most 1.6e-5 of a row's largest number. One digit alone would be off by more than codes are.
    """
    unit = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), 1e-30) * (1 / 127)
    scaled = x / unit
    high = jnp.round(scaled)
    low = jnp.round((scaled - high) * LOW)
    return jnp.concatenate([high, low], axis=-2).astype(jnp.int8), unit


def join_digits(products: Num[Array, "*#b m s"], unit: Float[Array, "*#b n 1"]) -> Float[Array, "*b n s"]:
    """Return the products of numbers, from the products of their digits."""
    high, low = jnp.split(products.astype(unit.dtype), 2, axis=-2)
    return (high + low * (1 / LOW)) * unit


def halves(codes: Integer[Array, "*b s w"]) -> tuple[Int[Array, "*b s w"], ...]:
    """Return codes as int8: all channels, or the first and the last half, which only a copy could join."""
    if codes.dtype == jnp.int8:
        return (codes,)
    wider = codes.astype(jnp.int32)  # a TPU does not compute with bytes
    return tuple((half - 8).astype(jnp.int8) for half in (wider & 15, wider >> 4))


def query_products(q: Float[Array, "*#b g d"], k: Operand, platform: str) -> Float[Array, "*b g s"]:
    """Return q k^T of keys [*b s d], at least float32; `platform` is as in `op.platform_of`."""
    kind, contraction = wide(q.dtype), "...gd,...sd->...gs"
    if isinstance(k, LazyRope | Encoded) or (isinstance(k, Quantised) and kind == jnp.float64):
        k = k.values(q.dtype)
    if not isinstance(k, Quantised):
        return jnp.einsum(contraction, q, k, preferred_element_type=kind)
    rows, unit = (q, None) if platform == "gpu" else digits(q.astype(kind))
    parts = halves(k.codes)
    shares = [
        jnp.einsum(contraction, row_part, part.astype(rows.dtype), preferred_element_type=_sums(rows))
        for row_part, part in zip(jnp.split(rows, len(parts), axis=-1), parts, strict=True)
    ]
    products = functools.reduce(jnp.add, shares)
    return (products if unit is None else join_digits(products, unit)) * k.scale[..., None, :]


def weighted_values(
    weights: Float[Array, "*b g s"], v: Operand, dtype: DTypeLike, platform: str
) -> Float[Array, "*b g e"]:
    """Return weighted sums of values [*b s e], at least float32; `dtype` is that of the queries."""
    kind, contraction = weights.dtype, "...gs,...sd->...gd"
    if isinstance(v, LazyRope | Encoded) or (isinstance(v, Quantised) and kind == jnp.float64):
        v = v.values(dtype)
    if not isinstance(v, Quantised):
        return jnp.einsum(contraction, weights.astype(v.dtype), v, preferred_element_type=kind)
    scaled = weights * v.scale[..., None, :]
    rows, unit = (scaled.astype(dtype), None) if platform == "gpu" else digits(scaled)
    parts = [
        jnp.einsum(contraction, rows, part.astype(rows.dtype), preferred_element_type=_sums(rows))
        for part in halves(v.codes)
    ]
    out = jnp.concatenate(parts, axis=-1)
    return out if unit is None else join_digits(out, unit)


def _sums(rows: Array) -> DTypeLike:
    # The dtype in which products accumulate.
    return jnp.int32 if rows.dtype == jnp.int8 else wide(rows.dtype)
