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

from pallas_kernels.attention import AttentionSpec
from pallas_kernels.blocks import block
from pallas_kernels.common import LANES, SUBLANES, padded
from pallas_kernels.decode_attention.kernel_parts import LOWEST, beside, products, stored, tempered
from pallas_kernels.decode_attention.types import DecodeInputs, Gumbel, Sinks

TILE = 32
"""Slots of an aligned part of a block of keys, in any dtype."""

SCALARS = pl.BlockSpec(memory_space=pltpu.SMEM)
"""A whole array of scalars."""


class Softmax(NamedTuple):
    """References of an online softmax, for each row: the largest logit, and the sum of exponentials relative to it."""

    top: Any
    total: Any


def logits_of(
    x: DecodeInputs,
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

    Args:
        x: the kernel's inputs; at most `LANES` sinks.
        q: queries in the layout of `rows_of`.
        visible: whether the query attends to the slot.
        channels: the axis of keys that holds channels.
        integers: as in `products`.
        first: the number of the block's first slot.
    """
    distance = position - query
    k, scale = (None if ref is None else ref[0] for ref in stored(x.k))
    assert k is not None
    heads = len(k)
    found = products(q, k, scale, channels, integers, shared=len(q) < heads)
    if x.sinks is not None and x.sinks.count:
        sinks = x.sinks.count
        near = min(LANES, position.shape[1])
        some = near if channels == 1 else min(padded(sinks, TILE), near)
        keys = k[:, :, :some] if channels == 1 else k[:, :some]
        scales = None if scale is None else scale[:, :some]
        own = products(rows_of(x.sinks.q[0], heads), keys, scales, channels, integers, shared=len(q) < heads)
        own = jnp.pad(own, ((0, 0), (0, 0), (0, near - some)))
        index = first + jax.lax.broadcasted_iota(jnp.int32, (heads, near), 1)
        here = (beside(position[:, :near], len(q)) < sinks) & (beside(index, len(q)) < sinks)
        if x.sinks.gap is not None:  # slopes place sinks nearer
            nearer = jnp.where((position[:, :near] < sinks) & (index < sinks), x.sinks.gap[row], 0)
            distance = jnp.concatenate([distance[:, :near] + nearer, distance[:, near:]], axis=1)
        found = jnp.concatenate([jnp.where(here, own, found[..., :near]), found[..., near:]], axis=-1)
    logits = x.spec.capped(found)
    if x.spec.slopes is not None:
        logits += x.spec.slopes[...] * beside(distance.astype(jnp.float32), len(q))
    seen = jnp.broadcast_to(beside(visible, len(q)), logits.shape)
    return jnp.where(seen, logits, LOWEST), seen


def noisy(
    gumbel: Any,
    logits: Float[Array, "n rows s"],
    visible: Bool[Array, "n rows s"],
    position: Int[Array, "h s"],
    row: Any,
    head: Any,
) -> Float[Array, "n rows s"]:
    """Return logits with the noise of a `Gumbel` at its temperature; `head` is the first head of the block."""
    seed = jax.lax.bitcast_convert_type(jnp.full(position.shape, gumbel.seed[row], jnp.int32), jnp.uint32)
    heads = head + jax.lax.broadcasted_iota(jnp.int32, position.shape, 0)
    heads += 0 if gumbel.first is None else gumbel.first[row]
    lay = functools.partial(beside, blocks=len(logits))
    return tempered(logits, visible, gumbel, seed, gumbel.tau[row], heads.astype(jnp.uint32), position, lay)


def advance(
    softmax: Softmax, logits: Float[Array, "n rows s"], acc: Any = None, weigh: Callable[[Array], Array] | None = None
) -> None:
    """Advance an online softmax by the logits of one block.

    `acc` refers to the unnormalized output, if there is one, and `weigh` returns its term from the block's weights.
    """
    top, total = softmax
    highest = jnp.maximum(top[...], logits.max(-1, keepdims=True))
    weights, kept = jnp.exp(logits - highest), jnp.exp(top[...] - highest)
    total[...] = kept * total[...] + weights.sum(-1, keepdims=True)
    if weigh is not None:
        acc[...] = kept * acc[...] + weigh(weights)
    top[...] = highest


def rows_and_blocks(heads: int, groups: int) -> tuple[int, int]:
    """Return how registers hold the query heads of `heads` KV heads: the number of blocks, and the rows of each.

    The queries of each KV head have a separate block. Single queries share one, which would hold eight equal rows.
    """
    if groups == 1 and heads % SUBLANES == 0:
        return heads // SUBLANES, SUBLANES
    return heads, padded(groups, SUBLANES)


def rows_of(x: Float[Array, "hg w"], heads: int) -> Float[Array, "n rows w"]:
    """Arrange packed rows as in `rows_and_blocks`; padding between groups has no meaning."""
    groups = len(x) // heads
    blocks, rows = rows_and_blocks(heads, groups)
    precise = x.astype(jnp.float32)  # a tile of float32 has SUBLANES rows
    if blocks * rows == len(x):
        tiles = precise.reshape(blocks, rows, x.shape[1])
    elif groups == 1:
        tiles = jnp.broadcast_to(precise[:, None], (heads, rows, x.shape[1]))
    else:
        own = [precise[i * groups : (i + 1) * groups] for i in range(heads)]
        tiles = jnp.stack([jnp.pad(some, ((0, rows - groups), (0, 0))) for some in own])
    return tiles.astype(x.dtype)


def placed_spec(spec: AttentionSpec, part: pl.BlockSpec) -> AttentionSpec:
    """Return settings whose slopes are a `blocks.block` in the rows of `rows_of`.

    A single slope fills all rows, which must be equal.
    """
    if spec.slopes is None:
        return spec
    slopes = spec.slopes.astype(jnp.float32)
    blocks, rows = rows_and_blocks(*slopes.shape)
    if blocks < len(slopes):
        slopes = slopes.reshape(blocks, rows, 1)
    else:
        slopes = jnp.pad(slopes[..., None], ((0, 0), (0, rows - slopes.shape[1]), (0, 0)), mode="edge")
    return dataclasses.replace(spec, slopes=block(slopes, part))


def placed_sinks(sinks: Sinks | None, part: pl.BlockSpec) -> Sinks | None:
    """Return sinks whose queries [b h g d] are a `blocks.block` of packed rows."""
    if sinks is None:
        return None
    b, h, g, d = sinks.q.shape
    gap = None if sinks.gap is None else block(sinks.gap, SCALARS)
    return Sinks(block(sinks.q.reshape(b, h * g, d), part), sinks.count, gap)


def placed_gumbel(gumbel: Gumbel | None) -> Gumbel | None:
    """Return noise whose numbers are `blocks.block`s of scalars."""
    if gumbel is None:
        return None
    seed = block(jax.lax.bitcast_convert_type(gumbel.seed, jnp.int32), SCALARS)
    first = None if gumbel.first is None else block(gumbel.first, SCALARS)
    return dataclasses.replace(gumbel, seed=seed, tau=block(gumbel.tau.astype(jnp.float32), SCALARS), first=first)


def packed(x: Float[Array, "n rows w"], heads: int, groups: int) -> Float[Array, "hg w"]:
    """Invert `rows_of`."""
    if len(x) < heads or groups == x.shape[1]:
        return x.reshape(-1, x.shape[2])
    if groups == 1:
        return x.max(1)  # all rows are equal, and v4 cannot gather one of each tile
    return jnp.concatenate([own[:groups] for own in x])


def summed(x: Float[Array, "n g s"], heads: int) -> Float[Array, "h s"]:
    """Sum over the queries of each KV head; heads that share registers have a single query."""
    return x.reshape(heads, -1) if len(x) < heads else x.sum(1)


def along_lanes(x: Float[Array, "n rows 1"], heads: int) -> Float[Array, "h rows"]:
    """Move one number of each row from sublanes to lanes, by a maximum since v4 cannot gather from sublanes."""
    if len(x) < heads:
        return x.reshape(heads, 1)
    rows = x.shape[1]
    shape = (len(x), rows, rows)
    own = jax.lax.broadcasted_iota(jnp.int32, shape, 1) == jax.lax.broadcasted_iota(jnp.int32, shape, 2)
    return jnp.where(own, x, -jnp.inf).max(1)
