"""Eviction for TPU, in place: pairs by an aligned read-modify-write, buffers with slots along lanes as whole blocks.

A blocked output that aliases its input is not filled before the kernel runs, so a partial write would leave garbage.
Whole blocks and explicit copies avoid that.

No step of the grid awaits a copy that it has started itself. Each step starts to read the tiles of its own block of
heads, starts to write those of the block before, and awaits the writes of the block before that. The grid is (cores,
blocks of heads of some rows, plus two steps). No copy crosses the first axis, which the cores of a two-core chip share.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.blocks import alias_block, input_block, output_block, run
from pallas_kernels.common import SUBLANES, VMEM_BYTES, over_cores, row_and_block, slots_lie_along_lanes, tpu_params
from pallas_kernels.evict.api import Evict
from pallas_kernels.ranking import EvictionRules, victim

UNIT = 16
"""Minimum slots of an aligned copy: one tile of 16 bits, two tiles of 32 bits."""


class EvictOutputs(NamedTuple):
    """Results of the kernel; `evicted` has what the buffers held."""

    slot: Any
    evicted_position: Any
    position: Any
    buffers: list[Any]
    evicted: list[Any]


class Scratch(NamedTuple):
    """Memory that is kept between steps, for two blocks of heads: one is read while the other is written."""

    tiles: list[Any]
    """Tiles of the wide buffers; None for other buffers."""
    slots: Any
    semaphores: Any


def evict(x: Evict, *, interpret: Any) -> tuple[Array, Array, Any, Array, Any]:
    b, h, c = x.position.shape
    heads = SUBLANES if h % SUBLANES == 0 else h
    blocks = h // heads
    cores, units = over_cores(b * blocks)

    def part(*tail: int, delay: int = 0) -> pl.BlockSpec:
        """Return the spec of a block of heads, used in its own step or `delay` steps later."""

        def index(core: Array, step: Array) -> tuple[Any, ...]:
            step = jnp.clip(step - delay, 0, units - 1)
            return row_and_block(core, step, units, blocks) + (0,) * len(tail)

        return pl.BlockSpec((1, heads, *tail), index)

    leaves, tree = jax.tree.flatten(x.buffers)
    kinds = [kind_of(leaf) for leaf in leaves]
    buffers: list[Any] = []
    added: list[Any] = []
    tiles: list[Any] = []
    for kind, leaf, value in zip(kinds, leaves, jax.tree.leaves(x.added), strict=True):
        value, width = value.astype(leaf.dtype), leaf.shape[-1]
        if kind == "narrow":
            if leaf.dtype == jnp.bool_:
                leaf, value = leaf.astype(jnp.int32), value.astype(jnp.int32)
            before, after = input_block(leaf, part(c)), input_block(value[..., None], part(1))
        elif kind == "planes":  # in the stored order, so XLA makes no copy
            before = input_block(leaf.swapaxes(2, 3), part(width, c))
            after = input_block(value[..., None], part(width, 1))
        else:
            # A block of eight heads does not fill a tile of 8-bit numbers.
            value = value.astype(jnp.int32) if value.dtype.itemsize == 1 else value
            before = input_block(leaf, pl.BlockSpec(memory_space=pl.ANY))
            after = input_block(value, part(width, delay=1))
        buffers.append(before)
        added.append(after)
        tiles.append(pltpu.VMEM((2, heads, slots_per_copy(leaf), width), leaf.dtype) if kind == "wide" else None)
    inputs = Evict(
        scores=None if x.scores is None else input_block(x.scores.astype(jnp.float32), part(c)),
        position=input_block(x.position, part(c)),
        new_position=input_block(x.new_position, pl.BlockSpec(memory_space=pltpu.SMEM)),
        buffers=buffers,
        added=added,
        protection=EvictionRules(*(input_block(rule[..., None], part(1)) for rule in x.protection.of_heads())),
        keep=None if x.keep is None else input_block(x.keep.astype(jnp.int32), part(c)),
        shrinks=x.shrinks,
    )
    number = output_block((b, h, 1), part(1), jnp.int32)
    evicted = [output_block(new.array.shape, new.spec, new.array.dtype) for new in added]
    semaphores = pltpu.SemaphoreType.DMA((2, max(1, kinds.count("wide")), 2))
    results = run(
        functools.partial(_kernel, units=units, blocks=blocks, kinds=kinds),
        (inputs,),
        EvictOutputs(number, number, alias_block(inputs.position), [alias_block(y) for y in buffers], evicted),
        grid=(cores, units + 2 * ("wide" in kinds)),
        scratch_shapes=[Scratch(tiles, pltpu.SMEM((2, heads), jnp.int32), semaphores)],
        compiler_params=tpu_params(1, 1, VMEM_BYTES),
        interpret=interpret,
        name="evict",
    )
    old_contents, new_buffers = [], []
    for kind, leaf, before, after in zip(kinds, leaves, results.evicted, results.buffers, strict=True):
        old_contents.append((before if kind == "wide" else before[..., 0]).astype(leaf.dtype))
        new_buffers.append((after.swapaxes(2, 3) if kind == "planes" else after).astype(leaf.dtype))
    pair = jax.tree.unflatten(tree, old_contents) if x.pairs else None
    updated = jax.tree.unflatten(tree, new_buffers)
    return results.slot[..., 0], results.evicted_position[..., 0], pair, results.position, updated


def kind_of(leaf: Array) -> str:
    """Return how a buffer is written: `wide` ones by copies of tiles, `planes` and `narrow` [b h c] as whole blocks."""
    return "narrow" if leaf.ndim == 3 else "planes" if in_planes(leaf) else "wide"


def in_planes(leaf: Array) -> bool:
    """Return whether a TPU stores a buffer [b h c w] as w rows of slots."""
    return slots_lie_along_lanes(*leaf.shape[2:])


def slots_per_copy(leaf: Array) -> int:
    """Return the slots of one aligned copy of a buffer [b h c w].

    They are one tile of 16 bits, two tiles of 32 bits, and a tile of 8 bits, or half of one if c requires it.
    """
    return max(UNIT, math.gcd(leaf.shape[2], 2 * UNIT)) if leaf.dtype.itemsize == 1 else UNIT


def dtype_32_bits(dtype: DTypeLike) -> Any:
    """Return the 32-bit dtype in which kernels select and sum numbers of a dtype."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32


def _kernel(x: Evict, outputs: EvictOutputs, scratch: Scratch, *, units: int, blocks: int, kinds: list[str]) -> None:
    tiles, slots, semaphores = scratch
    wide = [(leaf, tile) for leaf, tile in enumerate(tiles) if tile is not None]
    core, step = pl.program_id(0), pl.program_id(1)
    heads = x.position.shape[1]
    current = jax.lax.rem(step, 2)

    def place(step: Any) -> tuple[Any, Any]:
        row, block = row_and_block(core, step, units, blocks)
        return row, block * heads

    def start(step: Any, which: Any, *, into_cache: bool) -> None:
        row, first = place(step)
        for i, (leaf, tile) in enumerate(wide):
            rows = tile.shape[2]
            for head in range(heads):
                begin = pl.multiple_of(slots[which, head] & -rows, rows)
                cache = outputs.buffers[leaf].at[row, first + head, pl.ds(begin, rows)]
                ends = (tile.at[which, head], cache) if into_cache else (cache, tile.at[which, head])
                pltpu.make_async_copy(*ends, semaphores.at[int(into_cache), i, which]).start()

    def wait(which: Any, *, into_cache: bool) -> None:
        # Semaphores count bytes, so one wait covers the tiles of all heads.
        for i, (_, tile) in enumerate(wide):
            block_tiles = tile.at[which]
            pltpu.make_async_copy(block_tiles, block_tiles, semaphores.at[int(into_cache), i, which]).wait()

    pl.when(step >= 2)(functools.partial(wait, current, into_cache=True))

    @pl.when(step < units)
    def _() -> None:
        _choose(x, outputs, slots.at[current], x.new_position[place(step)[0]], kinds)
        start(step, current, into_cache=False)

    @pl.when((step >= 1) & (step <= units))
    def _() -> None:
        before = 1 - current
        wait(before, into_cache=False)
        writes = x.new_position[place(step - 1)[0]] >= 0
        for leaf, tile in wide:
            _replace(tile.at[before], slots.at[before], x.added[leaf], outputs.evicted[leaf], writes)
        start(step - 1, before, into_cache=True)


def _choose(x: Evict, outputs: EvictOutputs, slots: Any, newest: Any, kinds: list[str]) -> None:
    """Select the slots of a block of heads, and exchange entries of the buffers that are whole blocks."""
    heads, capacity = x.position.shape[1:]
    position = x.position[0]
    sinks, recent, limit = (rule[0] for rule in x.protection)
    keep = None if x.keep is None else x.keep[0] != 0
    scores = None if x.scores is None else x.scores[0]
    slot = victim(scores, position, newest, sinks, recent, limit, keep=keep, shrinks=x.shrinks)
    for head in range(heads):
        slots[head] = jnp.where(jax.lax.broadcasted_iota(jnp.int32, slot.shape, 0) == head, slot, 0).sum()
    is_victim = jax.lax.broadcasted_iota(jnp.int32, (heads, capacity), 1) == slot
    writes = newest >= 0
    evicted_position = jnp.where(is_victim, position, 0).sum(-1, keepdims=True)
    outputs.evicted_position[0] = jnp.where(writes, evicted_position, -1)
    outputs.position[0] = jnp.where(is_victim & writes, newest, position)
    leaves = zip(kinds, x.buffers, x.added, outputs.evicted, outputs.buffers, strict=True)
    for kind, leaf, new, evicted, after in leaves:
        if kind == "narrow":
            values = leaf[0]
            evicted[0] = _chosen(values, is_victim)
            after[0] = jnp.where(is_victim & writes, new[0], values)
        elif kind == "planes":
            for head in range(heads):
                values = leaf[0, head]
                chosen = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1) == slots[head]
                evicted[0, head] = _chosen(values, chosen)
                after[0, head] = jnp.where(chosen & writes, new[0, head], values)
    outputs.slot[0] = jnp.where(writes, slot, capacity)


def _replace(tile: Any, slots: Any, new: Any, evicted: Any, writes: Any) -> None:
    """Exchange entries in tiles that have arrived; tiles of a row of padding go back unchanged."""
    for head in range(tile.shape[0]):
        old = tile[head].astype(dtype_32_bits(tile.dtype))
        chosen = jax.lax.broadcasted_iota(jnp.int32, old.shape, 0) == slots[head] & (tile.shape[1] - 1)
        entry = jnp.where(chosen, old, jnp.zeros_like(old)).sum(0, keepdims=True)
        evicted[0, pl.ds(head, 1)] = entry.astype(evicted.dtype)
        value = new[0, pl.ds(head, 1)].astype(old.dtype)
        tile[head] = jnp.where(chosen & writes, value, old).astype(tile.dtype)


def _chosen(values: Array, chosen: Array) -> Array:
    """Return the one number of each row that is chosen."""
    # TPUs cannot sum unsigned integers.
    unsigned = values.dtype == jnp.uint32
    signed = jax.lax.bitcast_convert_type(values, jnp.int32) if unsigned else values
    total = jnp.where(chosen, signed, jnp.zeros_like(signed)).sum(-1, keepdims=True)
    return jax.lax.bitcast_convert_type(total, jnp.uint32) if unsigned else total
