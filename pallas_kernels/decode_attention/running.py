"""Code that TPU kernels over blocks of slots share: packed rows, and an online softmax in scratch memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention import AttentionSpec
from pallas_kernels.common import LANES, SUBLANES, padded
from pallas_kernels.decode_attention.kernel_parts import LOWEST, beside, products, tempered
from pallas_kernels.decode_attention.types import Gumbel

TILE = 32
"""Slots of an aligned part of a block of keys, in any dtype."""


def logits_of(
    refs: Any,
    q: Float[Array, "n rows d"],
    position: Int[Array, "h s"],
    visible: Bool[Array, "h s"],
    query: Int[Array, ""],
    spec: AttentionSpec,
    channels: int,
    integers: bool,
    sinks: int,
    first: Any,
    row: Any,
) -> tuple[Float[Array, "n rows s"], Bool[Array, "n rows s"]]:
    """Return the logits of a block of slots, `LOWEST` in masked slots, and the mask of visible slots.

    Args:
        refs: the kernel's inputs by name.
        q: queries in the layout of `rows_of`.
        position: position of the token in each slot.
        visible: whether the query attends to the slot.
        query: the query's position.
        spec: the layer's settings, without slopes.
        channels: the axis of keys that holds channels.
        integers: as in `products`.
        sinks: number of first tokens, at most `LANES`, that use the query `sinks_q` instead; 0 for none.
        first: the number of the block's first slot.
        row: the row of the batch.
    """
    distance = position - query
    k, scale = refs["k"][0], refs["k_scale"][0] if "k_scale" in refs else None
    heads = len(k)
    found = products(q, k, scale, channels, integers, shared=len(q) < heads)
    if sinks:
        near = min(LANES, position.shape[1])
        some = near if channels == 1 else min(padded(sinks, TILE), near)
        keys = k[:, :, :some] if channels == 1 else k[:, :some]
        scales = None if scale is None else scale[:, :some]
        own = products(rows_of(refs["sinks_q"][0], heads), keys, scales, channels, integers, shared=len(q) < heads)
        own = jnp.pad(own, ((0, 0), (0, 0), (0, near - some)))
        index = first + jax.lax.broadcasted_iota(jnp.int32, (heads, near), 1)
        here = (beside(position[:, :near], len(q)) < sinks) & (beside(index, len(q)) < sinks)
        if "sinks_gap" in refs:  # slopes place sinks nearer
            nearer = jnp.where((position[:, :near] < sinks) & (index < sinks), refs["sinks_gap"][row], 0)
            distance = jnp.concatenate([distance[:, :near] + nearer, distance[:, near:]], axis=1)
        found = jnp.concatenate([jnp.where(here, own, found[..., :near]), found[..., near:]], axis=-1)
    logits = spec.capped(found)
    if "slopes" in refs:
        logits += refs["slopes"][...] * beside(distance.astype(jnp.float32), len(q))
    seen = jnp.broadcast_to(beside(visible, len(q)), logits.shape)
    return jnp.where(seen, logits, LOWEST), seen


def noisy(
    refs: Any,
    logits: Float[Array, "n rows s"],
    visible: Bool[Array, "n rows s"],
    position: Int[Array, "h s"],
    gumbel: Gumbel,
    row: Any,
    head: Any,
) -> Float[Array, "n rows s"]:
    """Return logits with Keyformer's noise at its temperature; `head` is the first head of the block."""
    seed = jax.lax.bitcast_convert_type(jnp.full(position.shape, refs["seed"][row], jnp.int32), jnp.uint32)
    heads = head + jax.lax.broadcasted_iota(jnp.int32, position.shape, 0)
    heads += refs["first"][row] if "first" in refs else 0
    lay = functools.partial(beside, blocks=len(logits))
    return tempered(logits, visible, gumbel, seed, refs["tau"][row], heads.astype(jnp.uint32), position, lay)


def advance(
    scratch: Any, logits: Float[Array, "n rows s"], weigh: Callable[[Array], Array] | None = None, of: str = ""
) -> None:
    """Advance an online softmax by one block.

    Args:
        scratch: its `top` and `total`, and the unnormalized output `acc`.
        logits: logits of the block.
        weigh: function from the block's weights to their term of `acc`; None for a softmax without an output.
        of: prefix of the names of `top` and `total`.
    """
    top, total = scratch[f"{of}top"], scratch[f"{of}total"]
    highest = jnp.maximum(top[...], logits.max(-1, keepdims=True))
    weights, kept = jnp.exp(logits - highest), jnp.exp(top[...] - highest)
    total[...] = kept * total[...] + weights.sum(-1, keepdims=True)
    if weigh is not None:
        scratch["acc"][...] = kept * scratch["acc"][...] + weigh(weights)
    top[...] = highest


def log_sum(top: Array, total: Array) -> Array:
    """Return the logarithm of an online softmax's sum of exponentials; -inf if it is empty."""
    some = total > 0
    return jnp.where(some, top + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)


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


def slope_rows(slopes: Float[Array, "h g"]) -> Float[Array, "n rows 1"]:
    """Arrange ALiBi's slopes as `rows_of` arranges queries; a single one fills all rows, which must be equal."""
    blocks, rows = rows_and_blocks(*slopes.shape)
    if blocks < len(slopes):
        return slopes.astype(jnp.float32).reshape(blocks, rows, 1)
    missing = rows - slopes.shape[1]
    return jnp.pad(slopes.astype(jnp.float32)[..., None], ((0, 0), (0, missing), (0, 0)), mode="edge")


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
