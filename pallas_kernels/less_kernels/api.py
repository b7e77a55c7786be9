"""Features of queries and keys in the low-rank memory of LESS, each by two or three matmuls fused with what follows."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.common import Task, bucket, choose, first_limit, pallas_form
from pallas_kernels.less_kernels import reference


def phi(
    q: Float[Array, "b h g t d"],
    first: Float[Array, "h g d r"],
    second: Float[Array, "h g r f"],
    *,
    implementation: str = "auto",
    interpret: Any = False,
    platform: str | None = None,
) -> Float[Array, "b h g t f"]:
    r"""Features of queries (LESS, equation 1): :math:`\phi(q) = |\sigma(\sigma(q W_1) W_2)|` with the exact GELU.

    Implementations: `xla` everywhere, any dtype; `pallas` for TPU with no hidden layer in device memory: queries in
    float32 or bfloat16, weights in float32, d a multiple of 8 up to 256, r a multiple of 128 up to 2048, f up to 128.
    There is no GPU kernel: Triton's GELU is another function.

    Args:
        q: queries, rotated.
        first: W_1, one per query head.
        second: W_2.
        implementation: `auto`, `xla` or `pallas`.
        interpret: as for `pallas_call`.
        platform: for which the program is compiled; None for that of `jax.default_backend()`.

    Raises:
        Unsupported: the implementation asked for cannot run.
    """
    b, h, g, t, d = q.shape
    heads = q.reshape(b, h * g, t, d)
    weights = [x.reshape(h * g, *x.shape[2:]) for x in (first, second)]
    out = _run("phi", _per_head(heads), weights, implementation, interpret, platform)
    return _per_row(out, b).reshape(b, h, g, t, -1)


def psi(
    k: Float[Array, "b h t d"],
    first: Float[Array, "h d r"],
    second: Float[Array, "h r f"],
    third: Float[Array, "h f f"],
    outer_scale: Float[Array, "h f"],
    residual_scale: Float[Array, "h f"] | None = None,
    *,
    implementation: str = "auto",
    interpret: Any = False,
    platform: str | None = None,
) -> Float[Array, "b h t f"]:
    r"""Features of keys (LESS, equation 2 and section 3.2), with the exact GELU.

    .. math:: k_2 = |s_1| \, \sigma(\sigma(k W_1) W_2), \qquad \psi(k) = |k_2 + s_2 \, k_2 W_3|

    Implementations: those of `phi`.

    Args:
        k: keys, rotated.
        first: W_1, one per KV head.
        second: W_2.
        third: W_3.
        outer_scale: s_1.
        residual_scale: s_2; None for equation 2 as it is printed, :math:`|k_2 W_3|`.
        implementation: `auto`, `xla` or `pallas`.
        interpret: as for `pallas_call`.
        platform: for which the program is compiled; None for that of `jax.default_backend()`.

    Raises:
        Unsupported: the implementation asked for cannot run.
    """
    weights = [first, second, third, outer_scale, residual_scale]
    return _per_row(_run("psi", _per_head(k), weights, implementation, interpret, platform), len(k))


def _run(
    op: str,
    x: Float[Array, "m bt d"],
    layers: list[Any],
    implementation: str,
    interpret: Any = False,
    platform: str | None = None,
) -> Float[Array, "m bt f"]:
    limits = {"pallas": limit(x, layers[0], layers[1], platform)}
    (heads, tokens, d), hidden, features = x.shape, layers[0].shape[-1], layers[1].shape[-1]
    settings = dict(m=heads, d=d, r=hidden, f=features, dtype=x.dtype.name, weights=layers[0].dtype.name)
    name = bucket(op, dict(tokens=tokens), settings)
    task = Task(name, functools.partial(_run, op), dict(x=x, layers=layers))
    chosen = choose(op, implementation, limits, platform=platform, interpret=interpret, task=task)
    if chosen == "pallas":
        from pallas_kernels.less_kernels import pallas  # where it is used: it takes longer to import than kvjax

        return getattr(pallas, op)(x, *layers, interpret=interpret)
    return getattr(reference, op)(x, *layers)


def limit(x: Array, first: Array, second: Array, platform: str | None) -> str | None:
    """What these arguments ask that the Pallas kernels cannot do, or None."""
    d, hidden, features = x.shape[-1], first.shape[-1], second.shape[-1]
    return first_limit(
        (pallas_form(platform) == "tpu", "its kernel is for tpu, as Triton has no exact GELU"),
        (x.size > 0, "there are no tokens"),
        (x.dtype in (jnp.float32, jnp.bfloat16), f"it takes float32 or bfloat16, not {x.dtype}"),
        (first.dtype == jnp.float32, f"its weights are float32, not {first.dtype}"),
        (8 <= d <= 256 and d % 8 == 0, f"d={d} is not a multiple of 8 up to 256"),
        (hidden % 128 == 0 and hidden <= 2048, f"hidden={hidden} is not a multiple of 128 up to 2048"),
        (features <= 128, f"features={features} are more than 128"),
    )


def _per_head(x: Float[Array, "b m t d"]) -> Float[Array, "m bt d"]:
    # A head's weights are the larger part of a decode step's traffic: all rows together read them once.
    return jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1, x.shape[3])


def _per_row(x: Float[Array, "m bt f"], b: int) -> Float[Array, "b m t f"]:
    return jnp.swapaxes(x.reshape(x.shape[0], b, -1, x.shape[2]), 0, 1)
