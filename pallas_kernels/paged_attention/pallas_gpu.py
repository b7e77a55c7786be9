"""Attention over pages for GPU, by the kernel of `decode_attention`: each program takes some of one head's pages."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_kernels.attention import pad_to
from pallas_kernels.blocks import block, made, run
from pallas_kernels.decode_attention.api import DecodeAttention
from pallas_kernels.decode_attention.kernel_parts import placed
from pallas_kernels.decode_attention.pallas_gpu import PARAMS, Span, kernel, parts_of, placed_spec, products
from pallas_kernels.decode_attention.partials import PROGRAMS, ROWS, Parts, combined, steps
from pallas_kernels.operands import Operand
from pallas_kernels.paged_attention.api import Paged, PagedAttention
from pallas_kernels.paged_attention.pages import ranges

MOST_SPLITS = 8
"""Maximum programs that share a head; heads' lengths are known only at run time, and short heads leave some idle."""


def paged_attention(x: PagedAttention, *, interpret: Any) -> Paged:
    (b, h, g, d), e = x.q.shape, x.v.shape[-1]
    count, size = x.position.shape
    splits = min(max(1, PROGRAMS // (b * h)), MOST_SPLITS, count)

    def of_head(*tail: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *tail), lambda s, h, b: (b, h) + (0,) * len(tail))

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda s, h, b: (0,) * len(shape))

    def of_pool(width: int | None, channels: int) -> pl.BlockSpec:
        return whole(count * size) if width is None else whole(count * size, width)

    inputs = DecodeAttention(
        q=block(pad_to(x.q, 2, ROWS), of_head(ROWS, d)),
        k=placed(_flat(x.k), of_pool),
        v=placed(_flat(x.v), of_pool),
        position=block(x.position.reshape(-1), whole(count * size)),
        query_position=block(x.query_position, pl.BlockSpec((1,), lambda s, h, b: (b,))),
        spec=placed_spec(x.spec),
    )
    span = Span(*(block((page * size).reshape(b, h, 1), of_head(1)) for page in ranges(x.owner, x.pages, b * h)))
    outputs = Parts(*parts_of(b, h, splits, e), logits=made((count, g, size), whole(count, g, size)))
    settings = dict(size=steps(max(d, e) * x.q.dtype.itemsize), split=None, splits=splits, multiply=products(interpret))
    found = run(
        functools.partial(kernel, **settings),
        (inputs, span),
        outputs,
        grid=(splits, h, b),
        compiler_params=PARAMS,
        interpret=interpret,
        name="paged_attention",
    )
    out, lse = combined(found, g)
    return Paged(out, lse, found.logits)


def _flat(operand: Operand) -> Operand:
    # The slots of all pages, one after another.
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), operand)
