"""Kernel of a decode step for TPU: one grid step, with a block of heads and a split of their slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, UInt32

from pallas_kernels import operands
from pallas_kernels.attention import AttentionSpec
from pallas_kernels.common import LANES, row_and_block
from pallas_kernels.decode_attention import Gumbel
from pallas_kernels.decode_attention.kernel_parts import LOWEST, beside, seen, weighted
from pallas_kernels.decode_attention.running import (
    advance,
    along_lanes,
    log_sum,
    logits_of,
    noisy,
    packed,
    rows_of,
    summed,
)
from pallas_kernels.evict.pallas_tpu import counted
from pallas_kernels.hamming.hashing import WORD
from pallas_kernels.hamming.reference import distances_of_words
from pallas_kernels.ranking import Protection, victim


def kernel(
    refs: Any,
    outputs: Any,
    scratch: Any,
    *,
    units: int,
    blocks: int,
    slots: int,
    turned: tuple[str, ...],
    groups: int,
    spec: AttentionSpec,
    shrinks: bool,
    scores: str | Gumbel | None,
    adds: bool,
    words: tuple[str, ...],
    integers: bool,
    sinks: int,
) -> None:
    """Run one grid step: evict at the first split of slots, attend to each split, and copy the changed tiles back."""
    step, split, splits = pl.program_id(1), pl.program_id(2), pl.num_programs(2)
    row, block = row_and_block(pl.program_id(0), step, units, blocks)
    heads, capacity = refs["position"].shape[1:]
    several = slots < capacity
    newest = refs["new_position"][row]
    writes = newest >= 0
    q = rows_of(refs["q"][0], heads)
    gumbel = scores if isinstance(scores, Gumbel) else None

    scales = [name for name in ("k_scale", "v_scale") if name in refs]

    def of_heads(name: str) -> Array:  # [heads, 1]
        if name in scratch:
            return scratch[name][...]
        numbers = refs[name][...]
        here = jax.lax.broadcasted_iota(jnp.int32, numbers.shape, 1) == jax.lax.rem(row, LANES)
        words = jax.lax.bitcast_convert_type(numbers, jnp.int32)
        return jax.lax.bitcast_convert_type(jnp.where(here, words, 0).sum(-1, keepdims=True), numbers.dtype)

    def when(condition: Any) -> Callable[[Callable[[], None]], None]:
        # A single split is both the first and the last.
        return pl.when(condition) if several else lambda run: run()

    def new(name: str) -> Array:
        if f"{name}_new" in refs:
            return refs[f"{name}_new"][0]
        numbers = scratch.get(f"{name}_entry", refs[f"{name}_entry"].at[0])[...].astype(jnp.float32)
        return numbers * of_heads(f"{name}_scale_entry") if f"{name}_scale" in scales else numbers

    @when(split == 0)
    def _() -> None:
        position = refs["position"][0]
        bounds = [of_heads(name) if refs[name].ndim > 1 else refs[name][0] for name in Protection._fields]
        keep = refs["keep"][0] != 0 if "keep" in refs else None
        standing = refs["standing"][0] if "standing" in refs else None
        codes = [refs[name][0] for name in words]
        if codes:
            queries = refs["hashed_queries"][0].astype(jnp.float32)
            rows = queries[:, None] if groups == 1 else rows_of(queries, heads)
            hashed = [word for group in range(groups) for word in _words(refs["planes"], rows[:, group : group + 1])]
            standing = -distances_of_words(hashed, codes).astype(jnp.float32)
        slot = victim(standing, position, newest, *bounds, keep=keep, shrinks=shrinks)
        for head in range(heads):
            scratch["slots"][head] = slot[head, 0]
        scratch["slot"][...] = slot
        here = jax.lax.broadcasted_iota(jnp.int32, position.shape, 1) == slot
        left = jnp.where(here, position, 0).sum(-1, keepdims=True)
        outputs["left"][0] = jnp.where(writes, left, -1)
        outputs["slot"][0] = jnp.where(writes, slot, capacity)
        outputs["position"][0] = jnp.where(here & writes, newest, position)
        if codes:
            key = _words(refs["planes"], refs["hashed_key"][0].astype(jnp.float32)[:, None])
            for name, code, word in zip(words, codes, key, strict=True):
                outputs[name][0] = jnp.where(here & writes, word, code)
        for name in "kv":
            if f"{name}_entry" in scratch:
                numbers, wide = refs[f"{name}_entry"][0].astype(jnp.float32), scratch[f"{name}_entry"]
                if f"{name}_scale_entry" in scratch:
                    numbers, scratch[f"{name}_scale_entry"][...] = operands.codes_and_scale(numbers, 8)
                wide[...] = numbers.astype(wide.dtype)
        # The running softmax starts from the new token.
        key, value = (new(name) for name in "kv")
        logits = (q.astype(jnp.float32) * jnp.broadcast_to(beside(key, len(q)), q.shape)).sum(-1, keepdims=True)
        logits = jnp.where(writes, spec.capped(logits), LOWEST)
        scratch["top"][...] = jnp.maximum(logits, LOWEST / 2)
        scratch["total"][...] = jnp.where(writes, jnp.ones_like(logits), 0.0)
        value = jnp.broadcast_to(beside(value, len(q)), scratch["acc"].shape)
        scratch["acc"][...] = jnp.where(writes, value, 0.0)
        if gumbel is not None:
            written = jnp.full(logits.shape, writes)
            logits = noisy(refs, logits, written, jnp.full((heads, 1), newest), gumbel, row, block * heads)
            scratch["noisy_top"][...] = jnp.maximum(logits, LOWEST / 2)
            scratch["noisy_total"][...] = scratch["total"][...]
        if scores is not None:
            scratch["new"][...] = logits

    at = pl.ds(pl.multiple_of(split * slots, slots), slots) if several else slice(None)
    index = split * slots + jax.lax.broadcasted_iota(jnp.int32, (heads, slots), 1)
    position = refs["position"][0, :, at]
    visible = seen(position, newest, spec.window) & (index != scratch["slot"][...])
    for name in scales:
        taken = writes & (index == scratch["slot"][...])
        outputs[name][0] = jnp.where(taken, of_heads(f"{name}_entry"), refs[name][0])
    v_scale = refs["v_scale"][0] if "v_scale" in refs else None
    k_channels, v_channels = (1 if name in turned else 2 for name in "kv")
    first = split * slots
    logits, visible = logits_of(refs, q, position, visible, newest, spec, k_channels, integers, sinks, first, row)

    def wait() -> None:
        # Semaphores count bytes, so one wait covers the tiles of all heads.
        for i, name in enumerate("kv"):
            sent = scratch[f"{name}_tile"]
            pltpu.make_async_copy(sent, sent, scratch["sent"].at[i]).wait()

    @pl.when((step > 0) & (split == 0))
    def _() -> None:
        wait()

    advance(scratch, logits, lambda weights: weighted(weights, refs["v"][0], v_scale, v_channels, integers))
    if gumbel is not None:
        logits = noisy(refs, logits, visible, position, gumbel, row, block * heads)
        advance(scratch, logits, of="noisy_")
    if scores is not None:
        scratch["logits"][:, :, at] = logits

    for head in range(heads):
        slot = scratch["slots"][head]

        @when((slot >= split * slots) & (slot < (split + 1) * slots))
        def _(head: int = head, slot: Any = slot) -> None:
            for i, name in enumerate("kv"):
                row_of_head = head if name in turned else pl.ds(head, 1)
                own, entry = (0, row_of_head), scratch.get(f"{name}_entry")
                _send(
                    refs[name].at[0, head],
                    outputs[name].at[row, block * heads + head],
                    refs[f"{name}_entry"].at[own] if entry is None else entry.at[row_of_head],
                    outputs[f"{name}_taken"].at[own] if f"{name}_taken" in outputs else None,
                    scratch[f"{name}_tile"].at[head],
                    scratch["sent"].at[i],
                    slot,
                    split * slots,
                    writes,
                    int(name in turned),
                )

    @when(split == splits - 1)
    def _() -> None:
        total = scratch["total"][...]
        some = total > 0
        out = scratch["acc"][...] / jnp.where(some, total, 1.0)
        lse = log_sum(scratch["top"][...], total)
        outputs["out"][0] = packed(out, heads, groups).astype(outputs["out"].dtype)
        outputs["lse"][0] = along_lanes(lse, heads)
        if scores is None:
            return
        if gumbel is not None:
            total = scratch["noisy_total"][...]
        used = slice(groups if len(q) == heads else None)
        top = scratch["noisy_top" if gumbel is not None else "top"][:, used]
        share = 1 / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[:, used]
        found = jnp.exp(scratch["logits"][:, used] - top) * share
        new = jnp.exp(scratch["new"][:, used] - top) * share
        here = jax.lax.broadcasted_iota(jnp.int32, (heads, capacity), 1) == scratch["slot"][...]
        if scores == "each" and len(q) == heads:
            outputs["scores"][0] = jnp.where(here[:, None, :], new, found)
        else:
            found = summed(found, heads) + (refs["standing"][0] if adds else 0.0)
            outputs["scores"][0] = jnp.where(here & writes, summed(new, heads), found)

    # The next core's blocks do not await these copies.
    @pl.when((step == units - 1) & (split == splits - 1))
    def _() -> None:
        wait()


def _words(planes: Any, x: Float[Array, "h 1 d"]) -> list[UInt32[Array, "h 1"]]:
    """Return the words of a vector's code (`hamming.hashes`) in each head, given the planes [h bits d]."""
    projected = (planes[...] * x).sum(-1, keepdims=True)
    found = []
    for first in range(0, projected.shape[1], WORD):
        part = projected[:, first : first + WORD]
        bit = jnp.left_shift(1, jax.lax.broadcasted_iota(jnp.int32, part.shape, 1))
        found.append(jax.lax.bitcast_convert_type(jnp.where(part >= 0, bit, 0).sum(1), jnp.uint32))
    return found


def _send(
    block: Any,
    cache: Any,
    entry: Any,
    taken: Any,
    tile: Any,
    semaphore: Any,
    slot: Any,
    first: Any,
    writes: Any,
    axis: int,
) -> None:
    """Start to copy back the tile around a slot, with the new token's entry, from a block whose first slot is `first`.

    A row of padding writes nothing: its tiles go back unchanged. If `taken` is given, it gets the slot's old contents.
    """
    size = tile.shape[axis]
    start = pl.multiple_of(slot & -size, size)

    def slots(start: Any) -> tuple[Any, ...]:
        return (slice(None),) * axis + (pl.ds(pl.multiple_of(start, size), size),)

    old = block[slots(start - first)].astype(counted(tile.dtype))
    chosen = jax.lax.broadcasted_iota(jnp.int32, old.shape, axis) == slot - start
    if taken is not None:
        taken[...] = jnp.where(chosen, old, jnp.zeros_like(old)).sum(axis, keepdims=True)
    tile[...] = jnp.where(chosen & writes, entry[...], old).astype(tile.dtype)
    pltpu.make_async_copy(tile, cache.at[slots(start)], semaphore).start()
