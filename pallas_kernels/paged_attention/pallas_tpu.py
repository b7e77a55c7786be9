"""Attention over pages for TPU: each step takes some pages of one head, while those of the next step arrive.

The number of steps, and the pages of each, are known only at run time. Steps run in order, so running maxima and sums
stay in scratch memory.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from pallas_kernels.attention import log_sum, pad_to, positive
from pallas_kernels.blocks import input_block, output_block, run
from pallas_kernels.common import SUBLANES, VMEM_BYTES, padded, tpu_params
from pallas_kernels.decode_attention.api import DecodeAttention
from pallas_kernels.decode_attention.kernel_parts import (
    LOWEST,
    array_and_scale,
    block_products,
    block_weighted_sum,
    multiplies_integers,
    visible_slots,
)
from pallas_kernels.decode_attention.online_softmax import RunningAttention
from pallas_kernels.operands import Operand
from pallas_kernels.paged_attention.api import PagedAttention, PagedResult, ranges

SLOTS = (128, 512)
"""Approximate minimum and maximum slots of one grid step; each head's last step reads some that it does not use."""

MAX_SCALARS = 240_000
"""Maximum scalars of the steps, which must fit in a TPU's scalar memory of one mebibyte."""


class Steps(NamedTuple):
    """Scalars of all steps."""

    owner: Int[Array, " i"]
    """Owner of each step's pages."""
    first: Int[Array, " o"]
    """Each owner's first step."""
    begin: Int[Array, " o"]
    """Each owner's first page, and `end`, the one after its last."""
    end: Int[Array, " o"]
    query_position: Int[Array, " b"]


class Scratch(NamedTuple):
    """Memory that is kept between the steps of an owner."""

    running: RunningAttention
    logits: Any
    """A block of pages that belongs to other steps, and one that is copied out."""
    semaphore: Any


def paged_attention(x: PagedAttention, *, interpret: Any) -> PagedResult:
    (b, h, g, d), e = x.q.shape, x.v.shape[-1]
    count, size = x.position.shape
    pages, rows = tile(b * h, x.layers, count, size), padded(g, SUBLANES)
    begin, end = ranges(x.owner, x.pages, b * h)
    # A head without pages takes a step as well, which writes zeros.
    step_counts = jnp.maximum(1, pl.cdiv(end - begin, pages))
    last = jnp.cumsum(step_counts)
    owner = jnp.repeat(jnp.arange(b * h), step_counts, total_repeat_length=most_steps(b * h, count, pages))
    steps = jax.tree.map(lambda y: y.astype(jnp.int32), Steps(owner, last - step_counts, begin, end, x.query_position))

    def of_head(*tail: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *tail), lambda i, steps: (steps.owner[i],) + (0,) * len(tail))

    def of_pages(*tail: int) -> pl.BlockSpec:
        sizes = tuple(pl.Element(y) for y in (pages, *tail))
        return pl.BlockSpec(sizes, lambda i, steps: (_place(i, steps, pages, count)[1], 0, 0))

    def page_block(numbers: Array) -> Any:
        return input_block(numbers, of_pages(*numbers.shape[1:]))

    slopes: Any = x.spec.slopes
    if slopes is not None:
        of_group = pl.BlockSpec((1, rows, 1), lambda i, steps: (steps.owner[i] % h, 0, 0))
        slopes = input_block(pad_to(slopes.astype(jnp.float32)[..., None], 1, rows), of_group)
    inputs = DecodeAttention(
        q=input_block(pad_to(x.q, 2, rows).reshape(b * h, rows, d), of_head(rows, d)),
        k=jax.tree.map(page_block, _in_lanes(x.k)),
        v=jax.tree.map(page_block, _in_lanes(x.v)),
        position=page_block(x.position[:, None]),
        query_position=None,  # type: ignore[arg-type]  # with the scalars
        spec=dataclasses.replace(x.spec, slopes=slopes),
    )
    outputs = PagedResult(
        output_block((b * h, rows, e), of_head(rows, e)),
        output_block((b * h, rows, 1), of_head(rows, 1)),
        # The array has room for a whole block that begins with the last page.
        output_block((count + pages, g, size), pl.BlockSpec(memory_space=pl.ANY)),
    )
    scratch = Scratch(
        RunningAttention.scratch(rows, e=e),
        pltpu.VMEM((2 * pages, g, size), jnp.float32),
        pltpu.SemaphoreType.DMA(()),
    )
    results = run(
        functools.partial(_kernel, heads=h, pool=count, integers=multiplies_integers(interpret)),
        (inputs,),
        outputs,
        grid=(last[-1],),
        scratch_shapes=[scratch],
        scalars=steps,
        compiler_params=tpu_params(0, 1, VMEM_BYTES),
        interpret=interpret,
        name="paged_attention",
    )
    out, lse = (y.reshape(b, h, rows, -1)[:, :, :g] for y in (results.out, results.lse))
    logits = results.logits
    if g == 1:
        # Readers need pages along lanes: on v6e, transposing two dimensions takes an eighth of the cycles of three.
        logits = jax.lax.optimization_barrier(logits[:, 0])[:, None]
    return PagedResult(out, lse[..., 0], logits)


def tile(owners: int, layers: int, count: int, size: int) -> int:
    """Return the pages of one grid step, about as many as an owner has on average.

    The pool has `count` pages of `size` slots. Steps take more pages if their scalars would exceed `MAX_SCALARS`.
    """
    mean = count * size * 16 // 17 // (owners * layers)  # a pool is up to a sixteenth larger than its contents
    slots, max_slots = SLOTS
    while slots < max_slots and (
        slots < mean or scalar_count(owners, owners, count, _pages(slots, count, size)) > MAX_SCALARS
    ):
        slots *= 2
    return _pages(slots, count, size)


def _pages(slots: int, count: int, size: int) -> int:
    return min(max(1, slots // padded(size, 2 * SUBLANES)), count)


def most_steps(owners: int, count: int, block: int) -> int:
    """Return the maximum number of grid steps of `block` pages; an owner without pages takes a step as well."""
    return owners + count // block


def scalar_count(rows: int, owners: int, count: int, block: int) -> int:
    """Return the number of scalars of a TPU's steps: each step's owner, three per owner and one per row."""
    return most_steps(owners, count, block) + 3 * owners + rows


def _in_lanes(operand: Operand) -> Operand:
    # The scales of a page are a row of lanes.
    scale = array_and_scale(operand)[1]
    return operand if scale is None else dataclasses.replace(operand, scale=scale[:, None])  # type: ignore[type-var]


def _place(i: Array, steps: Steps, block: int, pool: int) -> tuple[Array, Array]:
    # The first page of a step, and of its block: at the pool's end the block begins earlier.
    owner = steps.owner[i]
    page = steps.begin[owner] + (i - steps.first[owner]) * block
    return page, jnp.minimum(page, pool - block)


def _kernel(
    steps: Steps,
    x: DecodeAttention,
    outputs: PagedResult,
    scratch: Scratch,
    *,
    heads: int,
    pool: int,
    integers: bool,
) -> None:
    i = pl.program_id(0)
    owner, state = steps.owner[i], scratch.running
    pages, size = x.position.shape[::2]
    groups = outputs.logits.shape[1]
    page, at = _place(i, steps, pages, pool)
    owned_pages = jnp.clip(steps.end[owner] - page, 0, pages)
    pl.when(page == steps.begin[owner])(state.begin)

    def row(ref: Any) -> Array:  # numbers of all slots, side by side
        return jnp.concatenate([ref[page] for page in range(pages)], axis=1)

    def real(shape: tuple[int, ...], axis: int, per_page: int = 1) -> Array:
        # A block may begin before these pages and end after them.
        which = jax.lax.broadcasted_iota(jnp.int32, shape, axis) + (at - page) * per_page
        return (which >= 0) & (which < owned_pages * per_page)

    position, query = row(x.position), steps.query_position[owner // heads]
    visible = visible_slots(position, query, x.spec.window) & real(position.shape, 1, size)
    (k, k_scale), (v, v_scale) = array_and_scale(x.k), array_and_scale(x.values)
    k, v = k[...], v[...]
    k_scale, v_scale = (None if scale is None else row(scale) for scale in (k_scale, v_scale))
    if v_scale is None:
        v = jnp.where(real(v.shape, 0), v, jnp.zeros_like(v))  # a weight of 0 does not remove another head's NaN
    else:
        v_scale = jnp.where(real(v_scale.shape, 1, size), v_scale, 0.0)
    k, v = (y.reshape(1, pages * size, -1) for y in (k, v))
    logits = x.spec.capped(block_products(x.q[...], k, k_scale, 2, integers))[0]
    if x.spec.slopes is not None:
        logits += x.spec.slopes[0] * (position - query).astype(jnp.float32)
    logits = jnp.where(visible, logits, LOWEST)
    state.softmax.advance(
        logits, state.acc, lambda weights: block_weighted_sum(weights[None], v, v_scale, 2, integers)[0]
    )

    # A whole block is copied out, and later steps overwrite what follows these pages. A block that begins earlier
    # copies only its own pages.
    sent = scratch.logits.at[pl.ds(pages, pages)]
    copy = pltpu.make_async_copy(sent, outputs.logits.at[pl.ds(page, pages)], scratch.semaphore)
    pl.when(i > 0)(copy.wait)  # awaits the copy of the step before, which is as large
    for index in range(pages):
        scratch.logits[pages + index - (page - at)] = logits[:groups, index * size : (index + 1) * size]
    copy.start()
    pl.when(i == pl.num_programs(0) - 1)(copy.wait)

    @pl.when(page + pages >= steps.end[owner])
    def _() -> None:
        top, total = (ref[...] for ref in state.softmax)
        outputs.out[0], outputs.lse[0] = state.acc[...] / positive(total), log_sum(top, total)
