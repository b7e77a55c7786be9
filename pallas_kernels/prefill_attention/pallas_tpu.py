"""Prompt attention and its column sums for TPU.

Logits are transposed, [keys, queries], so maxima and sums of a query's softmax are rows along the lanes. The grid is
(rows, heads, query heads of a group, blocks of queries, blocks of keys). If sums are requested, the exponentials of a
block of queries are held in VMEM until all of its keys have been processed. One product per block of exponentials then
multiplies them by the reciprocals of its queries' sums. If they do not fit in VMEM, a second pass computes them again,
with the grid (rows, heads, blocks of keys, query heads of a group, blocks of queries).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from pallas_kernels.attention import AttentionSpec, positive
from pallas_kernels.blocks import output_block, run
from pallas_kernels.common import LANES, chip, tpu_params
from pallas_kernels.decode_attention.kernel_parts import LOWEST, matmul
from pallas_kernels.prefill_attention.api import PrefillAttention, PromptAttention
from pallas_kernels.prefill_attention.tiles import Tiles, array_of, row

BLOCK = 512
"""Maximum queries and keys of one grid step; `LONG` doubles the keys."""
LONG = 4096
"""Number of 16-bit keys from which a step takes two blocks of them; below, causal prompts would lose more by that."""
SPILLS = 2 << 20
"""Bytes of VMEM that the compiler may take in addition."""
LOG2E = math.log2(math.e)


class _Common(NamedTuple):
    # Settings of both passes; the logits of `part` keys are computed together.
    ranges: dict[str, Int[Array, "3 m"]] | None
    tiles: Tiles
    spec: AttentionSpec
    tau: float
    part: int
    interpret: Any


def prefill_attention(x: PrefillAttention, *, interpret: Any) -> PromptAttention:
    q, k, v, spec, weights, scores = x.q, x.k, array_of(x.v), x.spec, x.weights, x.scores
    (b, h, g, n, _), c, e = q.shape, k.shape[2], v.shape[3]
    noise, tau = (x.noise, x.tau) if scores else (None, 1.0)
    size, width = (min(BLOCK, -(-count // LANES) * LANES) for count in (n, c))
    part, capacity = chip_memory(interpret)
    lines = g + (1 if weights is None else weights.shape[2])
    # Half as many queries are tried before a second pass; fewer would be no faster than that.
    shapes = [(size, width), (min(size, BLOCK // 2), width)]
    if c >= LONG and q.dtype.itemsize == 2:
        shapes.insert(0, (size, 2 * BLOCK))
    needs = {shape: _held_bytes(*shape, c, q, v, rows=lines) for shape in shapes} if scores else {}
    fitting = [shape for shape, need in needs.items() if need <= capacity]
    size, width = fitting[0] if fitting else (size, width) if scores else shapes[0]
    tiles = Tiles(n, c, size, width, spec.window, x.tokens)

    # The chip computes exponentials as powers of two, so logits are multiplied by log2(e).
    cap = None if spec.soft_cap is None else spec.soft_cap * LOG2E
    spec = dataclasses.replace(spec, scale=spec.scale * LOG2E, soft_cap=cap)
    blocks = tiles.padded(x)
    factor = None
    if noise is not None:
        # A factor per key of exponentials without noise: e^((x + zeta) / tau) = e^(x / tau) e^(zeta / tau).
        factor = jnp.exp((noise - noise.max(-1, keepdims=True)) / tau).astype(jnp.float32)
        blocks["factor"] = row(factor, tiles.keys * width, 0)
    if spec.slopes is not None:
        slopes = LOG2E * spec.slopes.astype(jnp.float32).reshape(1, -1, 1, 1)
        blocks["slope"] = jnp.broadcast_to(slopes, (1, h * g, 1, LANES))
    ranges = None if x.query_tokens is None else {"ranges": tiles.ranges_of(x.query_tokens)}
    common = _Common(ranges, tiles, spec, tau, part, interpret)
    if fitting:
        if weights is not None:
            blocks["weight"] = tiles.weights(weights, b)
        # At most twice the estimate: XLA keeps no arrays in VMEM that a kernel may take.
        results = _attend(blocks, common, min(2 * needs[size, width], capacity))
        lse, sums = results["rows"][:, :, :g], results["rows"][:, :, g:]
    else:
        results = _attend(blocks, common)
        lse, sums = results["lse"].reshape(b, h, g, -1), None
        if scores:
            again = {name: y for name, y in blocks.items() if name not in ("v", "factor")}
            again |= {"lse": results.get("tempered_lse", results["lse"]), "weight": tiles.weights(weights, b)}
            sums = _collect(again, common)
    if sums is not None:
        sums = sums[..., :c] if factor is None else sums[..., :c] * factor[:, :, None]
    return PromptAttention(results["out"].reshape(b, h, g, -1, e)[..., :n, :], lse[..., :n] / LOG2E, sums)


def chip_memory(interpret: Any) -> tuple[int, int]:
    """Return the columns of the target's matrix unit, and the bytes of VMEM that a kernel may take."""
    tpu = chip() if interpret is False else None
    columns, capacity = (LANES, 16 << 20) if tpu is None else (tpu.mxu_column_size, tpu.vmem_capacity_bytes)
    # With 7/8 of VMEM, v4 would need smaller steps with sums than without them.
    return columns, capacity // 32 * 31


def _held_bytes(size: int, width: int, c: int, q: Array, v: Array, *, rows: int) -> int:
    """Estimate bytes of VMEM: held exponentials, double-buffered blocks, scratch memory of a step, and spills."""
    length = max(q.shape[3], c) + width
    d, e = (max(x.shape[-1], LANES) for x in (q, v))
    blocks = q.dtype.itemsize * (size * d + width * (d + e)) + 4 * (size * e + -(-rows // 8) * 8 * length)
    return -(-c // width) * width * size * q.dtype.itemsize + 2 * blocks + 4 * size * (width + e) + SPILLS


def _attend(blocks: dict[str, Array], common: _Common, vmem_bytes: int | None = None) -> dict[str, Array]:
    """Return the output `out` [b, query heads, n, e] and binary log-sum-exps.

    If exponentials may be held in `vmem_bytes` bytes of VMEM, the log-sum-exps are above the column sums in one array,
    `rows` [b, heads, g + rows of weights, n or c]. If `vmem_bytes` is None, `lse` is [b, query heads, 1, n], and so is
    `tempered_lse`, that of the softmax that is to be summed, if it is a different one.
    """
    tiles = common.tiles
    (b, heads, n, _), (h, c, e), dtype = blocks["q"].shape, blocks["v"].shape[1:], blocks["v"].dtype
    g, weights = heads // h, blocks["weight"].shape[2] if "weight" in blocks else 1

    one = (1, tiles.size)
    # Running sums of attention's softmax, and of the one that is to be summed if it is different.
    totals = {"total": 1.0}
    if common.tau != 1 or "factor" in blocks:
        totals["tempered_total"] = common.tau
    scratch = {name: pltpu.VMEM(one, jnp.float32) for name in ("highest", *totals)}
    scratch["sum"] = pltpu.VMEM((e, tiles.size), jnp.float32)
    scratch["x"] = pltpu.VMEM((tiles.width, tiles.size), jnp.float32)
    spec = pl.BlockSpec((1, 1, tiles.size, e), lambda r, m, member, i, j, *_: (r, m * g + member, i, 0))
    outputs = {"out": output_block((b, heads, n, e), spec)}
    if vmem_bytes is None:
        spec = pl.BlockSpec((1, 1, *one), lambda r, m, member, i, j, *_: (r, m * g + member, 0, i))
        outputs |= {name: output_block((b, heads, 1, n), spec) for name in ("lse", "tempered_lse")[: len(totals)]}
    else:
        # One array for both, as every output adds a cost to every grid step.
        rows = (g + weights, max(n, c))
        spec = pl.BlockSpec((1, 1, *rows), lambda r, m, *_: (r, m, 0, 0))
        outputs["rows"] = output_block((b, h, *rows), spec)
        # Words, as registers hold them: as bfloat16 they would be shuffled on each write and read.
        scratch["p"] = pltpu.VMEM((tiles.keys, tiles.width * dtype.itemsize // 4, tiles.size), jnp.uint32)
        scratch["then"] = pltpu.VMEM((tiles.keys, tiles.size), jnp.float32)

    def kernel(*records: dict[str, Any]) -> None:
        ref = functools.reduce(operator.or_, records)
        division = tiles.with_refs(ref)
        member, i, j = (pl.program_id(axis) for axis in (2, 3, 4))

        @pl.when(j == 0)
        def _() -> None:
            ref["sum"][...] = jnp.zeros((e, tiles.size), jnp.float32)
            # Half of the lowest: the power of lowest - half is 0 also before any key is visible.
            ref["highest"][...] = jnp.full(one, LOWEST / 2, jnp.float32)
            for total in totals:
                ref[total][...] = jnp.zeros(one, jnp.float32)
            if vmem_bytes is not None:

                @pl.when((member == 0) & (i == 0))
                def _() -> None:
                    ref["rows"][...] = jnp.zeros(ref["rows"].shape, jnp.float32)

        pl.when(division.visible(i, j))(functools.partial(_see, ref, common, j))

        @pl.when(j == tiles.keys - 1)
        def _() -> None:
            ref["out"][0, 0] = (ref["sum"][...] / positive(ref["total"][...])).T
            highest = ref["highest"][...]
            lses = [_logarithm(highest * (1 / tau), ref[total][...]) for total, tau in totals.items()]
            if vmem_bytes is None:
                for name, lse in zip(("lse", "tempered_lse"), lses, strict=False):
                    ref[name][0, 0] = lse
                return
            ref["rows"][0, 0, pl.ds(member, 1), _block(i, tiles.size)] = lses[0]
            share, first, end = 1 / positive(ref[[*totals][-1]][...]), division.first(i), division.last(i) + 1
            if "weight" in ref:
                share *= ref["weight"][0, 0]
                end = jnp.where(jnp.max(jnp.abs(ref["weight"][0, 0])) > 0, end, first)

            def add(j: Any, _: None) -> None:
                # Held exponentials are relative to the maximum at their time.
                factor = (share * _power(ref["then"][pl.ds(j, 1)] - highest, common.tau)).astype(dtype)
                powers = pltpu.bitcast(ref["p"][j], dtype)
                ref["rows"][0, 0, g:, _block(j, tiles.width)] += matmul(factor, powers, (1, 1))

            jax.lax.fori_loop(first, end, add, None)

    def block_at(division: Tiles, r: Any, m: Any, member: Any, i: Any, j: Any) -> tuple[Any, ...]:
        return r, m * g + member, i, division.of_keys(i, j)

    return run(
        kernel,
        (tiles.inputs(blocks, block_at),),
        outputs,
        grid=(b, h, g, tiles.queries, tiles.keys),
        scratch_shapes=[OrderedDict(scratch)],
        scalars=common.ranges,
        compiler_params=tpu_params(4, 1) if vmem_bytes is None else tpu_params(2, 3, vmem_bytes),
        interpret=common.interpret,
        name="prefill_attend",
        # Turns of the loop at a row's end, to estimate cost.
        metadata=None if vmem_bytes is None else {"turns": str(tiles.keys)},
    )


def _see(ref: dict[str, Any], common: _Common, j: Any) -> None:
    """Process block j of the keys for a block of queries."""
    (width, _), dtype, tau = ref["x"].shape, ref["v"].dtype, common.tau
    parts = [slice(at, min(at + common.part, width)) for at in range(0, width, common.part)]
    column = {name: _column(ref[name][0, 0]) for name in ("key", "factor") if name in ref}
    tops: list[Array] = []
    for part in parts:
        x = _logits(ref, common.spec, column["key"][part], part)
        ref["x"][part] = x
        tops.append(_by_eight(jnp.max, x))
    before = ref["highest"][...]
    highest = jnp.maximum(before, jnp.max(functools.reduce(jnp.maximum, tops), axis=0, keepdims=True))
    ref["highest"][...] = highest
    shrink = jnp.exp2(before - highest)
    summed = ref["sum"][...] * shrink
    totals: list[Array] = []
    tempered_totals: list[Array] = []
    for part in parts:
        x = ref["x"][part] - highest
        # The tempered exponential is a power of the plain one, relative to the same maximum.
        tempered = _power(x, tau)
        p = tempered if tau == 1 else tempered * tempered if tau == 2 else jnp.exp2(x)
        totals.append(_by_eight(jnp.sum, p))
        rounded = p.astype(dtype)
        if "p" in ref:
            words = pltpu.bitcast(tempered.astype(dtype), jnp.uint32)
            ref["p"][j, pl.ds(part.start * dtype.itemsize // 4, len(words))] = words
        summed += matmul(ref["v"][0, 0, part], rounded, (0, 0))
        if "tempered_total" in ref:
            counted = tempered * column["factor"][part] if "factor" in column else tempered
            tempered_totals.append(_by_eight(jnp.sum, counted))
    ref["sum"][...] = summed
    ref["total"][...] = ref["total"][...] * shrink + _row_sum(totals)
    if "tempered_total" in ref:
        shrink = _power(before - highest, tau)
        ref["tempered_total"][...] = ref["tempered_total"][...] * shrink + _row_sum(tempered_totals)
    if "then" in ref:
        ref["then"][pl.ds(j, 1)] = highest


def _collect(blocks: dict[str, Array], common: _Common) -> Array:
    """Return column sums [b, heads, rows of weights, c]."""
    tiles, spec, tau = common.tiles, common.spec, common.tau
    b, h, c, _ = blocks["k"].shape
    g, rows = blocks["q"].shape[1] // h, blocks["weight"].shape[2]

    def kernel(*records: Any) -> None:
        *inputs, out_ref, sum_ref = records
        ref = functools.reduce(operator.or_, inputs)
        division = tiles.with_refs(ref)
        j, member, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)

        @pl.when((member == 0) & (i == 0))
        def _() -> None:
            sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

        weight = ref["weight"][0, 0]

        @pl.when(division.visible(i, j) & (jnp.max(jnp.abs(weight)) > 0))
        def _() -> None:
            lse, all_ = ref["lse"][0, 0], slice(0, tiles.width)
            x = _logits(ref, spec, _column(ref["key"][0, 0]), all_)
            p = jnp.exp2(x * (1 / tau) - jnp.where(lse == -jnp.inf, 0.0, lse))
            for m in range(rows):
                counted = p * weight[m : m + 1]
                parts = [counted[:, at : at + LANES] for at in range(0, tiles.size, LANES)]
                sum_ref[m] += functools.reduce(jnp.add, parts)

        @pl.when((member == g - 1) & (i == tiles.queries - 1))
        def _() -> None:
            for m in range(rows):
                out_ref[0, 0, m : m + 1] = jnp.sum(sum_ref[m].T, axis=0, keepdims=True)

    def block_at(division: Tiles, r: Any, m: Any, j: Any, member: Any, i: Any) -> tuple[Any, ...]:
        return r, m * g + member, division.of_queries(i, j), j

    return run(
        kernel,
        (tiles.inputs(blocks, block_at),),
        output_block((b, h, rows, c), pl.BlockSpec((1, 1, rows, tiles.width), lambda r, m, j, *_: (r, m, 0, j))),
        grid=(b, h, tiles.keys, g, tiles.queries),
        scratch_shapes=[pltpu.VMEM((rows, tiles.width, LANES), jnp.float32)],
        scalars=common.ranges,
        compiler_params=tpu_params(3, 2),
        interpret=common.interpret,
        name="prefill_column_sums",
    )


def _logits(ref: dict[str, Any], spec: AttentionSpec, key: Array, part: slice) -> Array:
    """Return masked logits [keys, queries] of a part of the keys."""
    query = ref["query"][0, 0]
    visible = jnp.where(key < 0, jnp.iinfo(jnp.int32).max, key) <= query
    if spec.window is not None:
        visible &= key > query - spec.window
    x = spec.capped(matmul(ref["k"][0, 0, part], ref["q"][0, 0], (1, 1)))
    if "slope" in ref:
        x += ref["slope"][0, 0][:, :1] * (key - query).astype(jnp.float32)
    return jnp.where(visible, x, LOWEST)


def _power(x: Array, tau: float) -> Array:
    """Return two to the power of logits at a temperature."""
    return jnp.exp2(x if tau == 1 else x * (1 / tau))


def _by_eight(reduced: Callable[..., Array], x: Array) -> Array:
    """Reduce [n, queries] to [8, queries]; the rows of a register stay separate."""
    return reduced(x.reshape(-1, 8, x.shape[1]), axis=0)


def _row_sum(parts: list[Array]) -> Array:
    return jnp.sum(functools.reduce(jnp.add, parts), axis=0, keepdims=True)


def _logarithm(highest: Array, total: Array) -> Array:
    return jnp.where(total > 0, highest + jnp.log2(positive(total)), -jnp.inf)


def _block(i: Any, length: int) -> Any:
    return pl.ds(pl.multiple_of(i * length, length), length)


def _column(row: Array) -> Array:
    """Transpose [1, n] to [n, 1], through a square of lanes."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]
