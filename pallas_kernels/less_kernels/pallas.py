"""Phi and psi of LESS for TPU: both matmuls of a head and what follows in one kernel, the hidden layer never leaves it.

Features lie transposed, [features, tokens], so that tokens fill the lanes. The grid is (heads, blocks of tokens); a
head's weights are fetched once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.common import LANES, SUBLANES, padded

BLOCK = 512
"""Tokens of one grid step, at most."""


def phi(
    x: Float[Array, "m t d"], first: Float[Array, "m d r"], second: Float[Array, "m r f"], *, interpret: Any
) -> Float[Array, "m t f"]:
    """See `reference.phi`; compiled for v4 to v6e, interpreted, never run on a chip."""

    def kernel(x_ref: Any, first_ref: Any, second_ref: Any, out_ref: Any) -> None:
        out_ref[0] = jnp.abs(_two_layers(x_ref, first_ref, second_ref))

    return _call(kernel, x, (first, _transposed(second)), interpret, "less_phi")


def psi(
    x: Float[Array, "m t d"],
    first: Float[Array, "m d r"],
    second: Float[Array, "m r f"],
    third: Float[Array, "m f f"],
    outer_scale: Float[Array, "m f"],
    residual_scale: Float[Array, "m f"] | None,
    *,
    interpret: Any,
) -> Float[Array, "m t f"]:
    """See `reference.psi`; compiled for v4 to v6e, interpreted, never run on a chip."""

    def kernel(x_ref: Any, first_ref: Any, second_ref: Any, third_ref: Any, outer_ref: Any, *refs: Any) -> None:
        *residual, out_ref = refs
        outer = jnp.abs(outer_ref[0]) * _two_layers(x_ref, first_ref, second_ref)
        mixed = _dot(third_ref[0], outer, (1, 0))
        out_ref[0] = jnp.abs(outer + residual[0][0] * mixed if residual else mixed)

    scales = [outer_scale] if residual_scale is None else [outer_scale, residual_scale]
    weights = (first, _transposed(second), _transposed(third), *[scale[..., None] for scale in scales])
    return _call(kernel, x, weights, interpret, "less_psi")


def _call(
    kernel: Callable[..., None], x: Float[Array, "m t d"], weights: tuple[Array, ...], interpret: Any, name: str
) -> Float[Array, "m t f"]:
    (m, t, d), features = x.shape, weights[1].shape[1]
    # Few tokens, as in a decode step, are one block of whole rows, which need not fill the lanes.
    size = padded(t, SUBLANES) if t < LANES else min(BLOCK, padded(t, LANES))
    tokens = padded(t, size)
    x = jnp.pad(x, ((0, 0), (0, tokens - t), (0, 0)))
    whole = [pl.BlockSpec((1, *weight.shape[1:]), lambda m, i: (m, 0, 0)) for weight in weights]
    out = pl.pallas_call(
        kernel,
        grid=(m, tokens // size),
        in_specs=[pl.BlockSpec((1, size, d), lambda m, i: (m, i, 0)), *whole],
        out_specs=pl.BlockSpec((1, features, size), lambda m, i: (m, 0, i)),
        out_shape=jax.ShapeDtypeStruct((m, features, tokens), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name=name,
    )(x, *weights)
    return jnp.swapaxes(out[..., :t], 1, 2)


def _two_layers(x_ref: Any, first_ref: Any, second_ref: Any) -> Float[Array, "f t"]:
    inner = _gelu(_dot(x_ref[0].astype(jnp.float32), first_ref[0], (1, 0)))
    return _gelu(_dot(second_ref[0], inner, (1, 1)))


def _dot(a: Array, b: Array, over: tuple[int, int]) -> Array:
    contracted = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(
        a, b, contracted, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1 + jax.lax.erf(x / math.sqrt(2)))


def _transposed(x: Float[Array, "m r f"]) -> Float[Array, "m f r"]:
    return jnp.swapaxes(x, 1, 2)
