"""Code that TPU kernels over blocks of slots share: packed rows, and an online softmax in scratch memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.blocks import input_block
from pallas_kernels.common import LANES, SUBLANES, padded
from pallas_kernels.decode_attention.api import DecodeAttention, LowRank, Sinks
from pallas_kernels.decode_attention.kernel_parts import (
    LOWEST,
    array_and_scale,
    block_products,
    channels_of,
    noisy_logits,
    per_query_row,
)
from pallas_kernels.operands import Operand, Quantised

TILE = 32
"""Slots of an aligned part of a block of keys, in any dtype."""

SCALARS = pl.BlockSpec(memory_space=pltpu.SMEM)
"""A whole array of scalars."""


class Softmax(NamedTuple):
    """References of an online softmax, for each row: the largest logit, and the sum of exponentials relative to it."""

    top: Any
    total: Any

    def advance(
        self, logits: Float[Array, "*n s"], acc: Any = None, weigh: Callable[[Array], Array] | None = None
    ) -> None:
        """Advance by the logits of one block.

        `acc` refers to the unnormalized output, if there is one, and `weigh` returns its term from the block's weights.
        """
        top, total = self
        highest = jnp.maximum(top[...], logits.max(-1, keepdims=True))
        weights, correction = jnp.exp(logits - highest), jnp.exp(top[...] - highest)
        total[...] = correction * total[...] + weights.sum(-1, keepdims=True)
        if weigh is not None:
            acc[...] = correction * acc[...] + weigh(weights)
        top[...] = highest


class RunningAttention(NamedTuple):
    """Attention so far, in memory that is kept between the splits of a block of heads."""

    acc: Any
    """Unnormalised output."""
    softmax: Softmax
    noisy: Softmax | None = None
    """Softmax of Keyformer's noisy logits."""
    logits: Any = None
    """Logits of all slots, if they become scores."""

    @classmethod
    def scratch(cls, *rows: int, e: int, noisy: bool = False, slots: int | None = None) -> RunningAttention:
        """Return the memory for these rows of queries, values of e channels, and logits of some slots."""
        softmax = Softmax(*(pltpu.VMEM((*rows, 1), jnp.float32) for _ in range(2)))
        logits = None if slots is None else pltpu.VMEM((*rows, slots), jnp.float32)
        return cls(pltpu.VMEM((*rows, e), jnp.float32), softmax, softmax if noisy else None, logits)

    def begin(self) -> None:
        """Start from no slots."""
        self.acc[...] = jnp.zeros(self.acc.shape, jnp.float32)
        for top, total in filter(None, (self.softmax, self.noisy)):
            top[...] = jnp.full(top.shape, LOWEST / 2, jnp.float32)
            total[...] = jnp.zeros(total.shape, jnp.float32)


class BlockLayout(NamedTuple):
    """Parts of arrays that a grid step gets: a block of a row's KV heads, and a split of their slots."""

    heads: int
    """KV heads of a block, of `groups` query heads each."""
    groups: int
    slots: int
    """Slots of a split."""
    place: Callable[..., tuple[Any, Any, Any]]
    """Function from a step's indices in the grid to its row, block of heads and split."""

    def of_heads(self, *tail: int, along: int | None = None) -> pl.BlockSpec:
        """Return the spec of a block of heads: all of it, or its split along one axis of the tail."""

        def index(*step: Any) -> tuple[Any, ...]:
            row, block, split = self.place(*step)
            return row, block, *(split if axis == along else 0 for axis in range(len(tail)))

        return pl.BlockSpec((1, self.heads, *tail), index)

    def of_slots(self, *width: int) -> pl.BlockSpec:
        """Return the spec of a split of numbers per slot."""
        return self.of_heads(self.slots, *width, along=0)

    def pairs(self, operand: Operand) -> Operand:
        """Return keys or values and their scales as `blocks.input_block`s."""
        array, scale = array_and_scale(operand)
        width = array.shape[-1]
        if channels_of(operand) == 2:
            numbers = input_block(array, self.of_slots(width))
        else:
            numbers = input_block(array.swapaxes(2, 3), self.of_heads(width, self.slots, along=1))
        return numbers if scale is None else Quantised(numbers, input_block(scale, self.of_slots()))

    def of_queries(self, width: int) -> pl.BlockSpec:
        """Return the spec of the query heads of a block, in the layout of the projections [b hg width]."""
        return pl.BlockSpec((1, self.heads * self.groups, width), self.of_heads(width).index_map)

    def of_block(self, *sizes: int) -> pl.BlockSpec:
        """Return the spec of an array of three dimensions that all rows share."""
        return pl.BlockSpec(sizes, lambda *step: (self.place(*step)[1], 0, 0))

    def inputs(self, x: DecodeAttention, position: pl.BlockSpec) -> DecodeAttention:
        """Return the arguments of attention as `blocks.input_block`s; `position` is the spec of the positions.

        Queries keep the projections' layout, since XLA would copy them into padded rows.
        """
        (b, h, g, _), slopes = x.q.shape, x.spec.slopes
        sinks, noise, low_rank = x.sinks, x.score_noise, x.low_rank

        def queries(y: Array) -> Any:
            return input_block(y.reshape(b, h * g, -1), self.of_queries(y.shape[-1]))

        def scalars(y: Array | None) -> Any:
            return None if y is None else input_block(y, SCALARS)

        if slopes is not None:
            blocks, rows = rows_and_blocks(self.heads, g)
            slopes = slopes.astype(jnp.float32)[..., None]
            if blocks < self.heads:
                slopes = slopes.reshape(-1, rows, 1)
            else:  # a single slope fills all rows, which must be equal
                slopes = jnp.pad(slopes, ((0, 0), (0, rows - g), (0, 0)), mode="edge")
            slopes = input_block(slopes, self.of_block(blocks, rows, 1))
        if low_rank is not None:
            phi, memory, z = jax.tree.map(lambda y: y.astype(jnp.float32), low_rank)
            low_rank = LowRank(queries(phi), *(input_block(y, self.of_heads(*y.shape[2:])) for y in (memory, z)))
        if sinks is not None:
            sinks = Sinks(queries(sinks.q), sinks.count, scalars(sinks.gap))
        if noise is not None:
            seed, tau = jax.lax.bitcast_convert_type(noise.seed, jnp.int32), noise.tau.astype(jnp.float32)
            numbers = dict(seed=scalars(seed), tau=scalars(tau), first=scalars(noise.first))
            noise = dataclasses.replace(noise, **numbers)
        return DecodeAttention(
            q=queries(x.q),
            k=self.pairs(x.k),
            v=None if x.v is None else self.pairs(x.v),
            position=input_block(x.position, position),
            query_position=scalars(x.query_position),
            spec=dataclasses.replace(x.spec, slopes=slopes),
            low_rank=low_rank,
            sinks=sinks,
            scores=noise,
        )


def logits_of(
    x: DecodeAttention,
    q: Float[Array, "n rows d"],
    position: Int[Array, "h s"],
    visible: Bool[Array, "h s"],
    query: Int[Array, ""],
    channels: int,
    integers: bool,
    first: Any,
    row: Any,
) -> tuple[Float[Array, "n rows s"], Bool[Array, "n rows s"]]:
    """Return the logits of a block of slots, `LOWEST` in masked slots, and the mask of visible slots.

    There are at most `LANES` sinks, q has the layout of `unpack_rows`, and the block begins at the slot `first`.
    """
    distance = position - query
    k, scale = (None if ref is None else ref[0] for ref in array_and_scale(x.k))
    assert k is not None
    heads = len(k)
    products = block_products(q, k, scale, channels, integers, several_heads=len(q) < heads)
    if x.sinks is not None and x.sinks.count:
        sinks = x.sinks.count
        near = min(LANES, position.shape[1])
        sink_slots = near if channels == 1 else min(padded(sinks, TILE), near)
        keys = k[:, :, :sink_slots] if channels == 1 else k[:, :sink_slots]
        scales = None if scale is None else scale[:, :sink_slots]
        queries = unpack_rows(x.sinks.q[0], heads)
        sink_products = block_products(queries, keys, scales, channels, integers, several_heads=len(q) < heads)
        sink_products = jnp.pad(sink_products, ((0, 0), (0, 0), (0, near - sink_slots)))
        index = first + jax.lax.broadcasted_iota(jnp.int32, (heads, near), 1)
        is_sink = (per_query_row(position[:, :near], len(q)) < sinks) & (per_query_row(index, len(q)) < sinks)
        if x.sinks.gap is not None:  # slopes place sinks nearer
            nearer = jnp.where((position[:, :near] < sinks) & (index < sinks), x.sinks.gap[row], 0)
            distance = _with_first(distance[:, :near] + nearer, distance)
        products = _with_first(jnp.where(is_sink, sink_products, products[..., :near]), products)
    logits = x.spec.capped(products)
    if x.spec.slopes is not None:
        logits += x.spec.slopes[...] * per_query_row(distance.astype(jnp.float32), len(q))
    mask = jnp.broadcast_to(per_query_row(visible, len(q)), logits.shape)
    return jnp.where(mask, logits, LOWEST), mask


def _with_first(first: Array, x: Array) -> Array:
    # Replaces the first entries of the last axis. Mosaic has no vectors of width 0, so none may be left of a short `x`.
    width = first.shape[-1]
    return first if width == x.shape[-1] else jnp.concatenate([first, x[..., width:]], axis=-1)


def add_noise(
    noise: Any,
    logits: Float[Array, "n rows s"],
    visible: Bool[Array, "n rows s"],
    position: Int[Array, "h s"],
    row: Any,
    head: Any,
) -> Float[Array, "n rows s"]:
    """Return logits with the noise of a `ScoreNoise` at its temperature; `head` is the first head of the block."""
    seed = jax.lax.bitcast_convert_type(jnp.full(position.shape, noise.seed[row], jnp.int32), jnp.uint32)
    heads = head + jax.lax.broadcasted_iota(jnp.int32, position.shape, 0)
    heads += 0 if noise.first is None else noise.first[row]
    lay = functools.partial(per_query_row, blocks=len(logits))
    return noisy_logits(logits, visible, noise, seed, noise.tau[row], heads.astype(jnp.uint32), position, lay)


def rows_and_blocks(heads: int, groups: int) -> tuple[int, int]:
    """Return how registers hold the query heads of `heads` KV heads: the number of blocks, and the rows of each.

    The queries of each KV head have a separate block. Single queries share one, which would hold eight equal rows.
    """
    if groups == 1 and heads % SUBLANES == 0:
        return heads // SUBLANES, SUBLANES
    return heads, padded(groups, SUBLANES)


def unpack_rows(x: Float[Array, "hg w"], heads: int) -> Float[Array, "n rows w"]:
    """Arrange packed rows as in `rows_and_blocks`; padding between groups has no meaning."""
    groups = len(x) // heads
    blocks, rows = rows_and_blocks(heads, groups)
    precise = x.astype(jnp.float32)  # a tile of float32 has SUBLANES rows
    if blocks * rows == len(x):
        tiles = precise.reshape(blocks, rows, x.shape[1])
    elif groups == 1:
        tiles = jnp.broadcast_to(precise[:, None], (heads, rows, x.shape[1]))
    else:
        head_rows = [precise[i * groups : (i + 1) * groups] for i in range(heads)]
        tiles = jnp.stack([jnp.pad(queries, ((0, rows - groups), (0, 0))) for queries in head_rows])
    return tiles.astype(x.dtype)


def pack_rows(x: Float[Array, "n rows w"], heads: int, groups: int) -> Float[Array, "hg w"]:
    """Invert `unpack_rows`."""
    if len(x) < heads or groups == x.shape[1]:
        return x.reshape(-1, x.shape[2])
    if groups == 1:
        return x.max(1)  # all rows are equal, and v4 cannot gather one of each tile
    return jnp.concatenate([tile[:groups] for tile in x])


def sum_groups(x: Float[Array, "n g s"], heads: int) -> Float[Array, "h s"]:
    """Sum over the queries of each KV head; heads that share registers have a single query."""
    return x.reshape(heads, -1) if len(x) < heads else x.sum(1)


def along_lanes(x: Float[Array, "n rows 1"], heads: int) -> Float[Array, "h _"]:
    """Move one number of each row from sublanes to lanes, by a maximum since v4 cannot gather from sublanes."""
    if len(x) < heads:
        return x.reshape(heads, 1)
    rows = x.shape[1]
    shape = (len(x), rows, rows)
    diagonal = jax.lax.broadcasted_iota(jnp.int32, shape, 1) == jax.lax.broadcasted_iota(jnp.int32, shape, 2)
    return jnp.where(diagonal, x, -jnp.inf).max(1)
