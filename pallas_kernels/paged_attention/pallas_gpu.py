"""Attention over pages for GPU, by the kernel of `decode_attention`: each program takes some of one head's pages."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import AttentionSpec
from pallas_kernels.decode_attention.kernel_parts import stored
from pallas_kernels.decode_attention.pallas_gpu import kernel, launch, products
from pallas_kernels.decode_attention.partials import PROGRAMS, ROWS, combined, steps
from pallas_kernels.operands import Operand
from pallas_kernels.paged_attention.pages import ranges
from pallas_kernels.paged_attention.types import Paged

MOST_SPLITS = 8
"""Maximum programs that share a head; heads' lengths are known only at run time, and short heads leave some idle."""


def paged_attention(
    q: Float[Array, "b h g d"],
    k: Operand,
    v: Operand,
    position: Int[Array, "P s"],
    owner: Int[Array, " P"],
    pages: Int[Array, "2"],
    query_position: Int[Array, " b"],
    spec: AttentionSpec,
    *,
    interpret: Any,
) -> Paged:
    """See `api.paged_attention`."""
    (b, h, g, d), e = q.shape, v.shape[-1]
    count, size = position.shape
    splits = min(max(1, PROGRAMS // (b * h)), MOST_SPLITS, count)
    begin, end = ranges(owner, pages, b * h)

    def padded(x: Array, axis: int) -> Array:
        return jnp.pad(x, [(0, ROWS - g if i == axis else 0) for i in range(x.ndim)])

    def of_head(*tail: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *tail), lambda s, h, b: (b, h) + (0,) * len(tail))

    def of_part(*tail: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, None, *tail), lambda s, h, b: (b, h, s) + (0,) * len(tail))

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda s, h, b: (0,) * len(shape))

    inputs: dict[str, tuple[Array, pl.BlockSpec]] = {
        "query_position": (query_position, pl.BlockSpec((1,), lambda s, h, b: (b,))),
        "q": (padded(q, 2), of_head(ROWS, d)),
        "position": (position.reshape(-1), whole(count * size)),
        "begin": ((begin * size).reshape(b, h, 1), of_head(1)),
        "end": ((end * size).reshape(b, h, 1), of_head(1)),
    }
    for name, operand in (("k", k), ("v", v)):
        array, scale = stored(operand)
        width = array.shape[-1]
        inputs[name] = (array.reshape(-1, width), whole(count * size, width))
        if scale is not None:
            inputs[f"{name}_scale"] = (scale.reshape(-1), whole(count * size))
    if spec.slopes is not None:
        block = pl.BlockSpec((None, ROWS), lambda s, h, b: (h, 0))
        inputs["slopes"] = (padded(spec.slopes.astype(jnp.float32), 1), block)
    outputs: dict[str, tuple[tuple[int, ...], pl.BlockSpec]] = {
        "out": ((b, h, splits, ROWS, e), of_part(ROWS, e)),
        "lse": ((b, h, splits, ROWS), of_part(ROWS)),
        "logits": ((count, g, size), whole(count, g, size)),
    }
    compiled = functools.partial(
        kernel,
        block=steps(max(d, e) * q.dtype.itemsize),
        split=None,
        splits=splits,
        groups=g,
        spec=dataclasses.replace(spec, slopes=None),
        scores="each",
        multiply=products(interpret),
    )
    found = launch(compiled, (splits, h, b), inputs, outputs, interpret=interpret, name="paged_attention")
    out, lse = combined(found, g)
    return Paged(out, lse, found["logits"])
