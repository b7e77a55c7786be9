"""Products of 8-bit integers on a CPU, whose vector instructions for them (VNNI) multiply unsigned by signed ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import batching, mlir
from jaxtyping import Array, Int8, Int32, UInt8

Codes = Int8[Array, "out in"] | UInt8[Array, "out in"]

OFFSET = 128
"""What unsigned codes are above signed ones."""

FEW_ROWS = {np.dtype(np.int8): 8, np.dtype(np.uint8): 64}
"""Largest number of rows for which products are faster with the codes first, by dtype of the codes.

With more rows, unsigned codes become signed ones. XLA takes that out of a loop over steps, but a single step converts
all weights, which takes longer than the products.
"""

WIDE = 8192
"""Number of outputs above which such products are faster in 16 blocks."""

SEVERAL_ROWS = 8
"""Number of rows above which products with fewer outputs are faster in four blocks."""


@functools.cache
def _has_vnni() -> bool:
    try:
        return "_vnni" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def code_dtype(platform: str) -> np.dtype:
    """Return the dtype of codes that a platform multiplies fastest."""
    return np.dtype(np.uint8 if platform == "cpu" and _has_vnni() else np.int8)


def signed(codes: Array) -> Array:
    """Return unsigned codes as signed ones; other arrays, such as weights in floating point, are returned unchanged."""
    return jax.lax.bitcast_convert_type(codes ^ np.uint8(OFFSET), jnp.int8) if codes.dtype == jnp.uint8 else codes


def unsigned(codes: Array) -> Array:
    """Return signed codes as unsigned ones."""
    return jax.lax.bitcast_convert_type(codes, jnp.uint8) ^ np.uint8(OFFSET)


def integer_product(rows: Int8[Array, "n in"], codes: Codes) -> Int32[Array, "n out"]:
    """Compute the product of rows by codes."""
    if len(rows) <= FEW_ROWS[codes.dtype]:
        # Without barriers XLA computes the rows twice, and exchanges the operands instead of transposing the result.
        rows = jax.lax.optimization_barrier(rows)
        blocks = math.gcd(len(codes), 16 if len(codes) > WIDE else 4 if len(rows) > SEVERAL_ROWS else 1)
        split, repeated = codes.reshape(blocks, -1, codes.shape[1]), jnp.broadcast_to(rows, (blocks, *rows.shape))
        sums = jax.lax.optimization_barrier(_dot.bind(split, repeated).reshape(len(codes), -1)).T
        return sums if codes.dtype == jnp.int8 else sums - OFFSET * rows.sum(-1, keepdims=True, dtype=jnp.int32)
    if codes.dtype == jnp.int8:
        return _dot.bind(rows, codes)
    # A product by ones gives the sums of the codes in a fraction of the time that XLA takes to add them.
    ones = jnp.ones((2, rows.shape[1]), jnp.int8)
    sums = jax.lax.optimization_barrier(_dot.bind(codes, ones))[:, 0] - OFFSET * rows.shape[1]
    return _dot.bind(unsigned(rows), signed(codes)) - OFFSET * sums


_dot = Primitive("integer_dot")
"""Product of [*b m k] and [*b n k] with 32-bit sums; `jax.lax.dot_general` would convert operands of two dtypes."""

_dot.def_impl(jax.jit(_dot.bind))


@_dot.def_abstract_eval
def _shape(lhs: Any, rhs: Any) -> ShapedArray:
    return ShapedArray((*lhs.shape[:-1], rhs.shape[-2]), jnp.dtype(jnp.int32))


def _lowered(context: mlir.LoweringRuleContext, lhs: Any, rhs: Any) -> Sequence[Any]:
    shape = _shape(*context.avals_in).shape
    batch, last = list(range(len(shape) - 2)), [len(shape) - 1]
    dimensions = stablehlo.DotDimensionNumbers.get(batch, batch, last, last)
    kind = ir.RankedTensorType.get(shape, ir.IntegerType.get_signless(32))
    return [stablehlo.dot_general(kind, lhs, rhs, dimensions)]


def _batched(operands: Sequence[Array], axes: Sequence[int | None]) -> tuple[Array, int]:
    size = next(operand.shape[axis] for operand, axis in zip(operands, axes, strict=True) if axis is not None)
    batch_first = (batching.bdim_at_front(operand, axis, size) for operand, axis in zip(operands, axes, strict=True))
    return _dot.bind(*batch_first), 0


mlir.register_lowering(_dot, _lowered)
batching.primitive_batchers[_dot] = _batched
