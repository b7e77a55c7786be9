"""RoPE for TPU: each step takes some rows of all heads and writes each head to a separate row."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.blocks import input_block, output_block, run
from pallas_kernels.common import SUBLANES, VMEM_BYTES, over_cores, tpu_params
from pallas_kernels.rope.api import RotateHeads


def rows_of_block(dtype: Any) -> int:
    """Return the rows of one grid step, which are those of a tile."""
    return SUBLANES * 4 // jnp.dtype(dtype).itemsize


def block_bytes(heads: Sequence[Array]) -> int:
    """Estimate a step's bytes of VMEM: heads before and after, both double-buffered, and scratch memory once."""
    numbers = sum(x.shape[1] * x.shape[2] for x in heads)
    return rows_of_block(heads[0].dtype) * numbers * (2 * heads[0].dtype.itemsize + 3 * 4)


def rope(inputs: RotateHeads, *, interpret: Any) -> tuple[Float[Array, "b n d"], ...]:
    heads, angles = inputs.heads, (inputs.cos, inputs.sin)
    b, rows = len(inputs.cos), rows_of_block(heads[0].dtype)
    cores, units = over_cores(b // rows)

    def of_rows(heads: int, width: int) -> pl.BlockSpec:
        return pl.BlockSpec((rows * heads, width), lambda core, step: (core * units + step, 0))

    packed = [x.reshape(b, -1) for x in heads]
    results = run(
        functools.partial(_kernel, rotated=len(inputs.rotated)),
        (
            [input_block(x, of_rows(1, x.shape[1])) for x in packed],
            *(input_block(x, of_rows(1, x.shape[1])) for x in angles),
        ),
        [output_block((b * x.shape[1], x.shape[2]), of_rows(*x.shape[1:]), x.dtype) for x in heads],
        grid=(cores, units),
        scratch_shapes=[[pltpu.VMEM((rows * x.shape[1], x.shape[2]), jnp.float32) for x in heads]],
        compiler_params=tpu_params(1, 1, VMEM_BYTES),
        interpret=interpret,
        name="rope",
    )
    return tuple(x.reshape(like.shape) for x, like in zip(results, heads, strict=True))


def _kernel(inputs: Sequence[Any], cos: Any, sin: Any, outputs: Sequence[Any], scratch: Any, *, rotated: int) -> None:
    rows = len(cos)
    for i, (heads, out) in enumerate(zip(inputs, outputs, strict=True)):
        wide = out if out.dtype == jnp.float32 else scratch[i]
        count, width = len(out) // rows, out.shape[1]
        for head in range(count):
            x = heads[:, head * width : (head + 1) * width].astype(jnp.float32)
            if i < rotated:
                x = x * cos[...] + pltpu.roll(x, width // 2, 1) * sin[...]
            # Only 32-bit rows can be written with a stride.
            wide[pl.ds(head, rows, stride=count), :] = x
        if wide is not out:
            out[...] = wide[...].astype(out.dtype)
