"""Contractions with codes in XLA: scales go to the logits and to the weights, so that no number is ever decoded.

On `cpu` and `tpu` codes meet two int8 digits of the other side's rows as integers; `gpu` converts them to the queries'
dtype on their way into the product. With float64, which asks for exactness, they are decoded.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import wide
from pallas_kernels.operands import Operand, Quantised, Turned

LOW = 254
"""Units of the low digit in one of the high digit, which is off by half of one at most."""


def digits(x: Float[Array, "*b n d"]) -> tuple[Int[Array, "*b m d"], Float[Array, "*b n 1"]]:
    """Rows of numbers as twice as many rows of int8, the high digits before the low ones, and each row's unit.

    Two digits are off by 1.6e-5 of a row's largest number at most; one alone would be by more than codes are.
    """
    unit = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), 1e-30) * (1 / 127)
    scaled = x / unit
    high = jnp.round(scaled)
    low = jnp.round((scaled - high) * LOW)
    return jnp.concatenate([high, low], axis=-2).astype(jnp.int8), unit


def joined(products: Int[Array, "*b m s"], unit: Float[Array, "*b n 1"]) -> Float[Array, "*b n s"]:
    """What the numbers' products are, from those of their digits."""
    high, low = jnp.split(products.astype(unit.dtype), 2, axis=-2)
    return (high + low * (1 / LOW)) * unit


def halves(codes: Int[Array, "*b s w"]) -> tuple[Int[Array, "*b s w"], ...]:
    """Codes as int8: of all channels, or of the first half and of the last; put together they would be a copy."""
    if codes.dtype == jnp.int8:
        return (codes,)
    wider = codes.astype(jnp.int32)  # a TPU does not compute with bytes
    return tuple((half - 8).astype(jnp.int8) for half in (wider & 15, wider >> 4))


def products(q: Float[Array, "*b g d"], k: Operand, platform: str) -> Float[Array, "*b g s"]:
    """q k^T of keys [*b s d], at least float32; `platform` as `common.platform_of` says."""
    kind, contraction = wide(q.dtype), "...gd,...sd->...gs"
    if isinstance(k, Turned) or (isinstance(k, Quantised) and kind == jnp.float64):
        k = k.values(q.dtype)
    if not isinstance(k, Quantised):
        return jnp.einsum(contraction, q, k, preferred_element_type=kind)
    rows, unit = (q, None) if platform == "gpu" else digits(q.astype(kind))
    parts = halves(k.codes)
    shares = [
        jnp.einsum(contraction, some, part.astype(rows.dtype), preferred_element_type=_sums(rows))
        for some, part in zip(jnp.split(rows, len(parts), axis=-1), parts, strict=True)
    ]
    found = functools.reduce(jnp.add, shares)
    return (found if unit is None else joined(found, unit)) * k.scale[..., None, :]


def weighted(weights: Float[Array, "*b g s"], v: Operand, dtype: DTypeLike, platform: str) -> Float[Array, "*b g e"]:
    """Sums of values [*b s e] with weights, at least float32; `dtype` is that of the queries."""
    kind, contraction = weights.dtype, "...gs,...sd->...gd"
    if isinstance(v, Turned) or (isinstance(v, Quantised) and kind == jnp.float64):
        v = v.values(dtype)
    if not isinstance(v, Quantised):
        return jnp.einsum(contraction, weights.astype(v.dtype), v, preferred_element_type=kind)
    scaled = weights * v.scale[..., None, :]
    rows, unit = (scaled.astype(dtype), None) if platform == "gpu" else digits(scaled)
    found = [
        jnp.einsum(contraction, rows, part.astype(rows.dtype), preferred_element_type=_sums(rows))
        for part in halves(v.codes)
    ]
    whole = jnp.concatenate(found, axis=-1)
    return whole if unit is None else joined(whole, unit)


def _sums(rows: Array) -> DTypeLike:
    # In what products are summed up.
    return jnp.int32 if rows.dtype == jnp.int8 else wide(rows.dtype)
