"""Kernel of a decode step for TPU: one grid step, with a block of heads and a split of their slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, UInt32

from pallas_kernels import operands
from pallas_kernels.attention import log_sum, positive
from pallas_kernels.common import LANES, row_and_block
from pallas_kernels.decode_attention import online_softmax
from pallas_kernels.decode_attention.api import DecodeAttention
from pallas_kernels.decode_attention.kernel_parts import (
    LOWEST,
    array_and_scale,
    block_weighted_sum,
    per_query_row,
    visible_slots,
)
from pallas_kernels.decode_attention.online_softmax import RunningAttention
from pallas_kernels.evict.pallas_tpu import dtype_32_bits
from pallas_kernels.fused_decode.api import Hashed, Ranking
from pallas_kernels.hamming.hashing import WORD
from pallas_kernels.hamming.reference import distances_of_words
from pallas_kernels.ranking import victim


class NewEntry(NamedTuple):
    """New keys or values."""

    stored: Any
    """As the cache stores them, or numbers whose codes the kernel computes."""
    scale: Any = None
    """Scale of the codes; None if the kernel computes it."""
    numbers: Any = None
    """As attention takes them, where `stored` has another layout; else None."""


class CacheOutput(NamedTuple):
    """Keys or values after the step."""

    cache: Any
    scale: Any = None
    evicted: Any = None
    """What the token's slot held, if it is requested."""


class ChangedTile(NamedTuple):
    """Slots of keys or values around the token's, to be copied back, and what the kernel computes of its entry."""

    slots: Any
    entry: Any = None
    scale: Any = None


class Inputs(NamedTuple):
    """Inputs of the kernel: positions of whole rows, and one split of keys and values."""

    attention: DecodeAttention
    ranking: Ranking
    k: NewEntry
    v: NewEntry


class StepOutputs(NamedTuple):
    """Results of the kernel, in the layout of the inputs."""

    out: Any
    lse: Any
    slot: Any
    evicted_position: Any
    position: Any
    k: CacheOutput
    v: CacheOutput
    codes: Any
    scores: Any = None


class Scratch(NamedTuple):
    """Memory that is kept between the splits of a block of heads."""

    running: RunningAttention
    slot: Any
    """Slots that the tokens take, as a vector, and `slots`, as scalars."""
    slots: Any
    k: ChangedTile
    v: ChangedTile
    sent: Any
    """Semaphores of the copies back."""
    new: Any = None
    """Logit of the token, if it becomes a score."""


class _Side(NamedTuple):
    # Keys or values. `channels` is the axis of channels in a block [heads, ., .].
    cache: Any
    scale: Any
    entry: NewEntry
    outputs: CacheOutput
    tile: ChangedTile
    channels: int


def kernel(
    x: Inputs,
    outputs: StepOutputs,
    scratch: Scratch,
    *,
    units: int,
    blocks: int,
    slots: int,
    channels: tuple[int, int],
    requested: str | None,
    adds: bool,
    integers: bool,
) -> None:
    """Run one grid step: evict at the first split of slots, attend to each split, and copy the changed tiles back.

    A core has `units` blocks of heads, and a row has `blocks`; `channels` are as in `kernel_parts.channels_of`.
    """
    step, split, splits = pl.program_id(1), pl.program_id(2), pl.num_programs(2)
    row, block = row_and_block(pl.program_id(0), step, units, blocks)
    attention, noise = x.attention, x.attention.score_noise
    heads, capacity = attention.position.shape[1:]
    groups = attention.q.shape[1] // heads
    several, first = slots < capacity, split * slots
    newest = attention.query_position[row]
    writes = newest >= 0
    q = online_softmax.unpack_rows(attention.q[0], heads)
    keys = _Side(*array_and_scale(attention.k), x.k, outputs.k, scratch.k, channels[0])
    values = _Side(*array_and_scale(attention.values), x.v, outputs.v, scratch.v, channels[1])
    sides = keys, values
    state = scratch.running

    def of_heads(ref: Any) -> Array:  # [heads, 1]
        numbers = ref[...]
        is_row = jax.lax.broadcasted_iota(jnp.int32, numbers.shape, 1) == jax.lax.rem(row, LANES)
        words = jax.lax.bitcast_convert_type(numbers, jnp.int32)
        return jax.lax.bitcast_convert_type(jnp.where(is_row, words, 0).sum(-1, keepdims=True), numbers.dtype)

    def when(condition: Any) -> Callable[[Callable[[], None]], None]:
        # A single split is both the first and the last.
        return pl.when(condition) if several else lambda run: run()

    def scale_of(side: _Side) -> Array:
        return of_heads(side.entry.scale) if side.tile.scale is None else side.tile.scale[...]

    def new(side: _Side) -> Array:
        if side.entry.numbers is not None:
            return side.entry.numbers[0]
        numbers = (side.entry.stored.at[0] if side.tile.entry is None else side.tile.entry)[...].astype(jnp.float32)
        return numbers if side.scale is None else numbers * scale_of(side)

    @when(split == 0)
    def _() -> None:
        position, ranking, importance = attention.position[0], x.ranking, x.ranking.importance
        rules = [of_heads(ref) if ref.ndim > 1 else ref[0] for ref in ranking.protection]
        keep = None if ranking.keep is None else ranking.keep[0] != 0
        codes: list[Array] = []
        if isinstance(importance, Hashed):
            (planes, of_queries, _), codes = importance.hashing, [code[0] for code in importance.codes]
            queries = of_queries[0].astype(jnp.float32)
            rows = queries[:, None] if groups == 1 else online_softmax.unpack_rows(queries, heads)
            words = [word for group in range(groups) for word in _words(planes, rows[:, group : group + 1])]
            numbers = -distances_of_words(words, codes).astype(jnp.float32)
        else:
            numbers = None if importance is None else importance[0]
        slot = victim(numbers, position, newest, *rules, keep=keep, shrinks=ranking.shrinks)
        for head in range(heads):
            scratch.slots[head] = slot[head, 0]
        scratch.slot[...] = slot
        is_victim = jax.lax.broadcasted_iota(jnp.int32, position.shape, 1) == slot
        evicted_position = jnp.where(is_victim, position, 0).sum(-1, keepdims=True)
        outputs.evicted_position[0] = jnp.where(writes, evicted_position, -1)
        outputs.slot[0] = jnp.where(writes, slot, capacity)
        outputs.position[0] = jnp.where(is_victim & writes, newest, position)
        if isinstance(importance, Hashed):
            key = _words(importance.hashing.planes, importance.hashing.keys[0].astype(jnp.float32)[:, None])
            for after, code, word in zip(outputs.codes, codes, key, strict=True):
                after[0] = jnp.where(is_victim & writes, word, code)
        for side in sides:
            if side.tile.entry is not None:
                numbers, wide = side.entry.stored[0].astype(jnp.float32), side.tile.entry
                if side.tile.scale is not None:
                    numbers, side.tile.scale[...] = operands.codes_and_scale(numbers, 8)
                wide[...] = numbers.astype(wide.dtype)
        # The running softmax starts from the new token.
        key, value = (new(side) for side in sides)
        logits = (q.astype(jnp.float32) * jnp.broadcast_to(per_query_row(key, len(q)), q.shape)).sum(-1, keepdims=True)
        logits = jnp.where(writes, attention.spec.capped(logits), LOWEST)
        state.softmax.top[...] = jnp.maximum(logits, LOWEST / 2)
        state.softmax.total[...] = jnp.where(writes, jnp.ones_like(logits), 0.0)
        value = jnp.broadcast_to(per_query_row(value, len(q)), state.acc.shape)
        state.acc[...] = jnp.where(writes, value, 0.0)
        if state.noisy is not None:
            real = jnp.full(logits.shape, writes)
            logits = online_softmax.add_noise(noise, logits, real, jnp.full((heads, 1), newest), row, block * heads)
            state.noisy.top[...] = jnp.maximum(logits, LOWEST / 2)
            state.noisy.total[...] = state.softmax.total[...]
        if requested is not None:
            scratch.new[...] = logits

    at = pl.ds(pl.multiple_of(first, slots), slots) if several else slice(None)
    index = first + jax.lax.broadcasted_iota(jnp.int32, (heads, slots), 1)
    position = attention.position[0, :, at]
    visible = visible_slots(position, newest, attention.spec.window) & (index != scratch.slot[...])
    for side in sides:
        if side.scale is not None:
            is_victim = writes & (index == scratch.slot[...])
            side.outputs.scale[0] = jnp.where(is_victim, scale_of(side), side.scale[0])
    v_scale = None if values.scale is None else values.scale[0]
    logits, visible = online_softmax.logits_of(
        attention, q, position, visible, newest, keys.channels, integers, first, row
    )

    def wait() -> None:
        # Semaphores count bytes, so one wait covers the tiles of all heads.
        for i, side in enumerate(sides):
            pltpu.make_async_copy(side.tile.slots, side.tile.slots, scratch.sent.at[i]).wait()

    pl.when((step > 0) & (split == 0))(wait)
    state.softmax.advance(
        logits,
        state.acc,
        lambda weights: block_weighted_sum(weights, values.cache[0], v_scale, values.channels, integers),
    )
    if state.noisy is not None:
        logits = online_softmax.add_noise(noise, logits, visible, position, row, block * heads)
        state.noisy.advance(logits)
    if requested is not None:
        state.logits[:, :, at] = logits

    for head in range(heads):
        slot = scratch.slots[head]

        @when((slot >= first) & (slot < (split + 1) * slots))
        def _(head: int = head, slot: Any = slot) -> None:
            for i, side in enumerate(sides):
                there = side.outputs.cache.at[row, block * heads + head]
                _send(side, head, there, scratch.sent.at[i], slot, first, writes)

    @when(split == splits - 1)
    def _() -> None:
        top, total = (ref[...] for ref in state.softmax)
        out = state.acc[...] / jnp.where(total > 0, total, 1.0)
        outputs.out[0] = online_softmax.pack_rows(out, heads, groups).astype(outputs.out.dtype)
        outputs.lse[0] = online_softmax.along_lanes(log_sum(top, total), heads)
        if requested is None:
            return
        used = slice(groups if len(q) == heads else None)
        if state.noisy is not None:
            total = state.noisy.total[...]
        top = (state.noisy or state.softmax).top[:, used]
        share = 1 / positive(total)[:, used]
        scores = jnp.exp(state.logits[:, used] - top) * share
        new = jnp.exp(scratch.new[:, used] - top) * share
        is_victim = jax.lax.broadcasted_iota(jnp.int32, (heads, capacity), 1) == scratch.slot[...]
        if requested == "each" and len(q) == heads:
            outputs.scores[0] = jnp.where(is_victim[:, None, :], new, scores)
        else:
            importance: Any = x.ranking.importance
            scores = online_softmax.sum_groups(scores, heads) + (importance[0] if adds else 0.0)
            outputs.scores[0] = jnp.where(is_victim & writes, online_softmax.sum_groups(new, heads), scores)

    # The next core's blocks do not await these copies.
    pl.when((step == units - 1) & (split == splits - 1))(wait)


def _words(planes: Any, x: Float[Array, "h 1 d"]) -> list[UInt32[Array, "h 1"]]:
    """Return the words of a vector's code (`hamming.hashes`) in each head, given the planes [h bits d]."""
    projected = (planes[...] * x).sum(-1, keepdims=True)
    words = []
    for first in range(0, projected.shape[1], WORD):
        part = projected[:, first : first + WORD]
        bit = jnp.left_shift(1, jax.lax.broadcasted_iota(jnp.int32, part.shape, 1))
        words.append(jax.lax.bitcast_convert_type(jnp.where(part >= 0, bit, 0).sum(1), jnp.uint32))
    return words


def _send(side: _Side, head: int, there: Any, semaphore: Any, slot: Any, first: Any, writes: Any) -> None:
    """Start to copy back the tile around a slot, with the new token's entry, from a block whose first slot is `first`.

    A row of padding writes nothing: its tiles go back unchanged.
    """
    axis, tile = 2 - side.channels, side.tile.slots.at[head]
    row = head if axis else pl.ds(head, 1)
    size = tile.shape[axis]
    start = pl.multiple_of(slot & -size, size)

    def slots(start: Any) -> tuple[Any, ...]:
        return (slice(None),) * axis + (pl.ds(pl.multiple_of(start, size), size),)

    old = side.cache.at[0, head][slots(start - first)].astype(dtype_32_bits(tile.dtype))
    chosen = jax.lax.broadcasted_iota(jnp.int32, old.shape, axis) == slot - start
    if side.outputs.evicted is not None:
        side.outputs.evicted[0, row] = jnp.where(chosen, old, jnp.zeros_like(old)).sum(axis, keepdims=True)
    entry = side.entry.stored[0, row] if side.tile.entry is None else side.tile.entry[row]
    tile[...] = jnp.where(chosen & writes, entry, old).astype(tile.dtype)
    pltpu.make_async_copy(tile, there.at[slots(start)], semaphore).start()
