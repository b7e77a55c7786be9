"""Attention over pages for GPU, by the kernel of `decode_attention`: each program takes some of one head's pages."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_kernels.blocks import input_block, output_block
from pallas_kernels.decode_attention.api import DecodeAttention
from pallas_kernels.decode_attention.pallas_gpu import Span, attend_parts, of_head
from pallas_kernels.decode_attention.splits import PROGRAMS, merge_attention, slots_per_step
from pallas_kernels.paged_attention.api import PagedAttention, PagedResult, ranges

MOST_SPLITS = 8
"""Maximum programs that share a head; heads' lengths are known only at run time, and short heads leave some idle."""


def paged_attention(x: PagedAttention, *, interpret: Any) -> PagedResult:
    (b, h, g, d), e = x.q.shape, x.v.shape[-1]
    count, size = x.position.shape
    splits = min(max(1, PROGRAMS // (b * h)), MOST_SPLITS, count)

    def whole_array(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda s, h, b: (0,) * len(shape))

    def flat(operand: Any) -> Any:  # the slots of all pages, one after another
        return jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), operand)

    pool = DecodeAttention(x.q, flat(x.k), flat(x.v), flat(x.position), x.query_position, x.spec)
    span = Span(*(input_block((page * size).reshape(b, h, 1), of_head(1)) for page in ranges(x.owner, x.pages, b * h)))
    logits = output_block((count, g, size), whole_array(count, g, size))
    of_slots, step = functools.partial(whole_array, count * size), slots_per_step(max(d, e) * x.q.dtype.itemsize)
    parts = attend_parts(
        pool, of_slots, span, logits, size=step, splits=splits, interpret=interpret, name="paged_attention"
    )
    out, lse = merge_attention(parts, g)
    return PagedResult(out, lse, parts.logits)
