"""Decode attention for Hopper through Pallas's Mosaic GPU lowering: one warp group copies, another multiplies.

A block of threads handles one split of a head's slots. One of its warp groups has the copy engine (TMA) fill a ring in
shared memory; the other multiplies from there on tensor cores (WGMMA). WGMMA products have at least 64 rows. Slots and
channels are therefore rows, and the few queries are columns: logits are K q^T, results V^T p. XLA merges the splits,
and adds noise to probabilities.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.attention import pad_to
from pallas_kernels.common import padded
from pallas_kernels.decode_attention.api import DecodeAttention, Decoded
from pallas_kernels.decode_attention.kernel_parts import LOWEST, seen
from pallas_kernels.decode_attention.partials import ROWS, Parts, merged, splits_of
from pallas_kernels.decode_attention.reference import increments

BLOCK = 64
"""Slots of one step: the rows of a product."""
RING = 96 * 1024
"""Bytes of keys and values in shared memory, so that two blocks of threads fit on a multiprocessor."""
LEAST = 128
"""Bytes of the smallest copy: one byte for each thread of a warp group."""


class Scratch(NamedTuple):
    """Shared memory of a block of threads, a ring of stages, and its barriers."""

    queries: Any
    keys: Any
    values: Any
    weights: Any
    positions: Any
    slopes: Any
    q_ready: Any
    k_ready: Any
    v_ready: Any
    k_free: Any
    v_free: Any


def decode_attention(x: DecodeAttention, *, interpret: Any) -> Decoded:
    (b, h, g, d), dtype = x.q.shape, x.q.dtype
    c, e = x.v.shape[2:]
    blocks = pl.cdiv(c, BLOCK)
    splits = splits_of(b * h, c, BLOCK)
    split = pl.cdiv(blocks, splits)
    stages = max(1, min(split, RING // (BLOCK * (d + e) * dtype.itemsize)))

    slopes = x.spec.slopes
    if slopes is not None:
        slopes = pad_to(slopes.astype(jnp.float32), 1, LEAST // 4)
    inputs = DecodeAttention(
        q=pad_to(x.q, 2, ROWS),
        k=x.k,
        v=x.v,
        position=pad_to(x.position, 2, blocks * BLOCK, -1).reshape(b, h, blocks, BLOCK),
        query_position=x.query_position,
        spec=dataclasses.replace(x.spec, slopes=slopes),
    )
    columns = padded(g, 8)  # registers are stored in tiles of 8 columns
    shapes: list[tuple[int, ...]] = [(b, h, splits, e, ROWS), (b, h, splits, ROWS)]
    if x.scores is not None:
        shapes.append((b, h, blocks, BLOCK, columns))

    def tiled(*shape: int) -> Any:
        transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    (found,) = plgpu.kernel(
        functools.partial(kernel, split=split, blocks=blocks, stages=stages, chip=interpret is False),
        out_type=[Parts(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))],
        scratch_types=[
            Scratch(
                queries=tiled(ROWS, d),
                keys=tiled(stages, BLOCK, d),
                values=tiled(stages, BLOCK, e),
                weights=tiled(ROWS, BLOCK),
                positions=plgpu.SMEM((stages, BLOCK), jnp.int32),
                slopes=plgpu.SMEM((LEAST // 4,), jnp.float32),
                q_ready=plgpu.Barrier(num_arrivals=1 + (slopes is not None)),
                k_ready=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
                v_ready=plgpu.Barrier(num_barriers=stages),
                k_free=plgpu.Barrier(num_barriers=stages),
                v_free=plgpu.Barrier(num_barriers=stages),
            )
        ],
        grid=(splits, h, b),
        grid_names=("part", "head", "row"),
        num_threads=2,
        thread_name="group",
        kernel_name="decode_attention",
        interpret=simulated(interpret),
    )(inputs)
    logits = found.logits
    if logits is not None:
        logits = logits.reshape(b, h, blocks * BLOCK, columns)[:, :, :c, :g].swapaxes(2, 3)
    found = Parts(found.out.swapaxes(3, 4), found.lse, logits)
    decoded = merged(found, g, splits, x.scores if x.gumbel is None else "each")
    if x.gumbel is not None:
        assert decoded.scores is not None
        decoded = decoded._replace(scores=increments(decoded.scores, x.position, x.gumbel))
    whole = x.with_evicted(decoded.partial)
    return decoded._replace(out=whole.out[:, :, :, 0], lse=whole.lse[:, :, :, 0])


def simulated(interpret: Any) -> Any:
    """Return `interpret` as `plgpu.kernel` takes it; jax has no public name for its interpreter's parameters yet."""
    if interpret is True:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        # Copies return zeros beyond an array's end, as on a GPU.
        return InterpretGPUParams(out_of_bounds_reads="uninitialized", uninitialized_memory="zero")
    return None if interpret is False else interpret


def kernel(x: Any, outputs: Parts, scratch: Scratch, *, split: int, blocks: int, stages: int, chip: bool) -> None:
    """Run both warp groups of a block of threads, on `DecodeAttention` of all blocks of threads.

    A split has `split` of the head's `blocks` of slots; the ring has `stages`, and `chip` is False in an interpreter.
    """
    queries, keys, values, weights, positions, slopes, q_ready, k_ready, v_ready, k_free, v_free = scratch
    # Without a `chip`, arrays are multiplied instead of references, and have no layouts: jax's interpreter has no rules
    # for those. Layouts change where numbers are stored, not their values.
    part, head, row = (jax.lax.axis_index(name) for name in ("part", "head", "row"))
    first = part * split
    steps = jnp.minimum(split, blocks - first)

    def laid(y: Array, layout: Any) -> Array:
        return plgpu.layout_cast(y, layout) if chip else y

    def over_columns(y: Array, shape: tuple[int, ...]) -> Array:
        return laid(jax.lax.broadcast_in_dim(y, shape, (0,)), plgpu.Layout.WGMMA)

    def over_rows(y: Array, shape: tuple[int, ...]) -> Array:
        return laid(jax.lax.broadcast_in_dim(y, shape, (1,)), plgpu.Layout.WGMMA)

    def store(ref: Any, value: Array) -> None:
        # jax 0.12 requires stores of whole cache lines, which few queries in columns do not fill.
        store_lines = getattr(plgpu, "store", None)
        if chip and store_lines is not None:
            store_lines(ref, value, optimized=False)
        else:
            ref[...] = value

    def product(a: Any, b: Any, turned: bool = False) -> Array:  # a b^T, or a^T b^T
        if not chip:
            over = (((0 if turned else 1,), (1,)), ((), ()))
            return jax.lax.dot_general(a[...], b[...], over, preferred_element_type=jnp.float32)
        a = a.transpose((1, 0)) if turned else a
        b = b.transpose((1, 0))

        def multiply(acc: Any) -> Array:
            plgpu.wgmma(acc, a, b)
            return acc[...]

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))

    @pl.when(jax.lax.axis_index("group") == 0)
    def _copy() -> None:
        plgpu.copy_gmem_to_smem(x.q.at[row, head], queries, q_ready)
        if x.spec.slopes is not None:
            plgpu.copy_gmem_to_smem(x.spec.slopes.at[head], slopes, q_ready)

        def step(i: Array, _: None) -> None:
            stage, block = jax.lax.rem(i, stages), first + i
            slots = pl.ds(block * BLOCK, BLOCK)

            @pl.when(i >= stages)
            def _() -> None:
                plgpu.barrier_wait(k_free.at[stage])

            plgpu.copy_gmem_to_smem(x.position.at[row, head, block], positions.at[stage], k_ready.at[stage])
            plgpu.copy_gmem_to_smem(x.k.at[row, head, slots], keys.at[stage], k_ready.at[stage])

            @pl.when(i >= stages)
            def _() -> None:
                plgpu.barrier_wait(v_free.at[stage])

            plgpu.copy_gmem_to_smem(x.v.at[row, head, slots], values.at[stage], v_ready.at[stage])

        jax.lax.fori_loop(0, steps, step, None)

    @pl.when(jax.lax.axis_index("group") == 1)
    def _attend() -> None:
        of_slot, of_query = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
        query = x.query_position[row]
        plgpu.barrier_wait(q_ready)

        def step(i: Array, carry: Any) -> Any:
            acc, top, total = carry
            # The barrier keeps the addresses of a one-stage ring out of registers during the loop.
            stage = jax.lax.optimization_barrier(jax.lax.rem(i, stages))
            again = i + stages < steps
            plgpu.barrier_wait(k_ready.at[stage])
            at = laid(positions[stage], of_slot)
            logits = x.spec.capped(product(keys.at[stage], queries))

            @pl.when(again)
            def _() -> None:
                plgpu.commit_smem()  # positions are read by ordinary loads, and the next copy overwrites them
                plgpu.barrier_arrive(k_free.at[stage])

            shape = logits.shape
            at = over_columns(at, shape)
            if x.spec.slopes is not None:
                slope = laid(slopes[:ROWS], of_query)
                logits += over_rows(slope, shape) * (at - query).astype(jnp.float32)
            logits = jnp.where(seen(at, query, x.spec.window), logits, LOWEST)
            if outputs.logits is not None:
                columns = outputs.logits.shape[-1]
                some = jax.lax.slice(logits, (0, 0), (BLOCK, columns))
                store(outputs.logits.at[row, head, first + i], some)
            highest = jnp.maximum(top, logits.max(0))
            shares, kept = jnp.exp(logits - over_rows(highest, shape)), jnp.exp(top - highest)
            total = kept * total + shares.sum(0)
            rounded = shares.astype(weights.dtype)
            if chip:
                weights.transpose((1, 0))[...] = laid(rounded, plgpu.Layout.WGMMA_TRANSPOSED)
            else:
                weights[...] = rounded.T
            plgpu.commit_smem()
            plgpu.barrier_wait(v_ready.at[stage])
            acc = over_rows(kept, acc.shape) * acc + product(values.at[stage], weights, turned=True)

            @pl.when(again)
            def _() -> None:
                if not chip:  # here ordinary loads read them, not WGMMA
                    plgpu.commit_smem()
                plgpu.barrier_arrive(v_free.at[stage])

            return acc, highest, total

        start = (
            laid(jnp.zeros((values.shape[-1], ROWS), jnp.float32), plgpu.Layout.WGMMA),
            laid(jnp.full(ROWS, LOWEST / 2, jnp.float32), of_query),
            laid(jnp.zeros(ROWS, jnp.float32), of_query),
        )
        acc, top, total = jax.lax.fori_loop(0, steps, step, start)
        some = jnp.where(total > 0, total, 1.0)
        store(outputs.out.at[row, head, part], acc / over_rows(some, acc.shape))
        store(outputs.lse.at[row, head, part], jnp.where(total > 0, top + jnp.log(some), LOWEST))
