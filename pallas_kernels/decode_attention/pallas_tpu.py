"""Decode attention for TPU: slots pass through VMEM once, and logits stay there until they become scores.

The grid is (rows, blocks of heads, splits of slots). The last axis runs in order, so running maxima and sums stay in
scratch memory.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import AttentionSpec
from pallas_kernels.common import LANES, SUBLANES, slots_lie_along_lanes, tpu_params
from pallas_kernels.decode_attention.kernel_parts import (
    LOWEST,
    beside,
    dot,
    multiplies_integers,
    of_each,
    seen,
    stored,
    weighted,
)
from pallas_kernels.decode_attention.running import (
    advance,
    along_lanes,
    log_sum,
    logits_of,
    noisy,
    packed,
    rows_and_blocks,
    rows_of,
    slope_rows,
    summed,
)
from pallas_kernels.decode_attention.types import Decoded, Gumbel, LowRank, Sinks
from pallas_kernels.operands import Operand

BLOCK_BYTES = 1 << 20
"""Approximate bytes of keys in one grid step; values take as many, and both are double-buffered."""
HELD_BYTES = 4 << 20
"""Maximum bytes of logits held in VMEM until their row is done; longer rows write them out, and XLA scores them."""
VMEM_BYTES = 14 << 20
ROOMY = 64 << 20
"""Bytes of VMEM from which blocks and kernels' VMEM are twice as large: v4 has less, later chips have it."""


def decode_attention(
    q: Float[Array, "b h g d"],
    k: Operand,
    v: Operand,
    position: Int[Array, "b h c"],
    query_position: Int[Array, " b"],
    spec: AttentionSpec,
    *,
    low_rank: LowRank | None,
    sinks: Sinks | None,
    scores: str | Gumbel | None,
    interpret: Any,
) -> Decoded:
    """See `api.decode_attention`."""
    b, h, g, d = q.shape
    c, e = v.shape[2:]
    heads, slots = tile(h, c, max(d, e), min(stored(x)[0].dtype.itemsize for x in (k, v)))
    splits, (blocks, rows) = pl.cdiv(c, slots), rows_and_blocks(heads, g)
    shared = blocks < heads
    # With heads that share registers, scores are as large as logits and are held twice.
    held = 4 * (blocks * rows + (2 * heads if shared else 0)) * splits * slots
    keep = scores is not None and held <= HELD_BYTES

    def of_heads(*tail: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, heads, *tail), lambda b, h, s: (b, h) + (0,) * len(tail))

    # Queries keep the projections' layout: XLA would copy them into padded rows, and rows of sums into lanes.
    def of_queries(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, heads * g, width), lambda b, h, s: (b, h, 0))

    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    of_slots = pl.BlockSpec((1, heads, slots), lambda b, h, s: (b, h, s))
    inputs: dict[str, tuple[Array, pl.BlockSpec]] = {
        "query_position": (query_position, scalars),
        "q": (q.reshape(b, h * g, d), of_queries(d)),
        "position": (position, of_slots),
    }
    if sinks is not None:
        inputs["sinks_q"] = (sinks.q.reshape(b, h * g, d), of_queries(d))
        if sinks.gap is not None:
            inputs["sinks_gap"] = (sinks.gap, scalars)
    turned = []  # names of operands whose blocks are [channels, slots]
    for name, operand in (("k", k), ("v", v)):
        array, scale = stored(operand)
        if scale is not None:
            inputs[f"{name}_scale"] = (scale, of_slots)
        width = array.shape[-1]
        # XLA stores it in this order already, so the swap is free; otherwise XLA would copy the cache at every step.
        if slots_lie_along_lanes(c, width):
            turned.append(name)
            block = pl.BlockSpec((1, heads, width, slots), lambda b, h, s: (b, h, 0, s))
            inputs[name] = (jnp.swapaxes(array, 2, 3), block)
        else:
            inputs[name] = (array, pl.BlockSpec((1, heads, slots, width), lambda b, h, s: (b, h, s, 0)))
    if spec.slopes is not None:
        block = pl.BlockSpec((blocks, rows, 1), lambda b, h, s: (h, 0, 0))
        inputs["slopes"] = (slope_rows(spec.slopes), block)
    if low_rank is not None:
        features = low_rank.features.shape[-1]
        inputs["phi"] = (low_rank.features.astype(jnp.float32).reshape(b, h * g, features), of_queries(features))
        inputs["h"] = (low_rank.h.astype(jnp.float32), of_heads(features, e))
        inputs["z"] = (low_rank.z.astype(jnp.float32), of_heads(features))
    if isinstance(scores, Gumbel):
        inputs["seed"] = (jax.lax.bitcast_convert_type(scores.seed, jnp.int32), scalars)
        inputs["tau"] = (scores.tau.astype(jnp.float32), scalars)
        if scores.first is not None:
            inputs["first"] = (scores.first, scalars)

    told = 1 if shared else rows
    outputs: dict[str, tuple[tuple[int, ...], pl.BlockSpec]] = {
        "out": ((b, h * g, e), of_queries(e)),
        "lse": ((b, h, told), of_heads(told)),
    }
    scratch = {"acc": (blocks, rows, e), "top": (blocks, rows, 1), "total": (blocks, rows, 1)}
    if isinstance(scores, Gumbel):
        scratch |= {"noisy_top": (blocks, rows, 1), "noisy_total": (blocks, rows, 1)}
    if keep:
        shape = (g, c) if scores == "each" and not shared else (c,)
        outputs["scores"] = ((b, h, *shape), of_heads(*shape))
        scratch["logits"] = (blocks, rows, splits * slots)
    elif scores is not None:
        several = pl.BlockSpec((1, heads, rows, slots), lambda b, h, s: (b, h, 0, s))
        outputs["logits"] = ((b, h, c), of_slots) if shared else ((b, h, rows, c), several)
        outputs["scores_lse"] = ((b, h, told), of_heads(told))

    kernel = functools.partial(
        _kernel,
        capacity=c,
        turned=tuple(turned),
        groups=g,
        spec=dataclasses.replace(spec, slopes=None),
        scores=_static(scores),
        integers=multiplies_integers(interpret),
        sinks=0 if sinks is None else sinks.count,
    )
    called = pl.pallas_call(
        kernel,
        grid=(b, pl.cdiv(h, heads), splits),
        in_specs=[{name: spec for name, (_, spec) in inputs.items()}],
        out_specs={name: spec for name, (_, spec) in outputs.items()},
        out_shape={name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, (shape, _) in outputs.items()},
        scratch_shapes=[{name: pltpu.VMEM(shape, jnp.float32) for name, shape in scratch.items()}],
        compiler_params=tpu_params(2, 1, VMEM_BYTES * room()),
        interpret=interpret,
        name="decode_attention",
    )
    found = called({name: array for name, (array, _) in inputs.items()})
    result = found.get("scores")
    if "logits" in found:
        # Rows are too long for VMEM: XLA scores them in an elementwise epilogue.
        finite = jnp.where(jnp.isfinite(found["scores_lse"]), found["scores_lse"], 0.0)
        result = jnp.exp(found["logits"].reshape(b, h, told, c) - finite[..., None])[:, :, :g]
        result = result if scores == "each" else result.sum(2)
    elif scores == "each":
        result = found["scores"].reshape(b, h, g, c)
    return Decoded(found["out"].reshape(b, h, g, e), found["lse"][:, :, :g], result)


def room() -> int:
    """Return the factor by which blocks may exceed `BLOCK_BYTES` on the target TPU."""
    try:
        return 2 if pltpu.get_tpu_info().vmem_capacity_bytes >= ROOMY else 1
    except ValueError:  # no TPU, or one unknown to jax
        return 1


def tile(h: int, c: int, d: int, itemsize: int) -> tuple[int, int]:
    """Return the KV heads and slots of one grid step, for d numbers per head and slot of `itemsize` bytes each."""
    heads, most = SUBLANES if h % SUBLANES == 0 else h, BLOCK_BYTES * room()
    while h % (2 * heads) == 0 and 2 * heads * c * d * itemsize <= most:
        heads *= 2  # for short rows: a step must take longer than its start
    slots = max(LANES, most // (heads * d * itemsize) // LANES * LANES)
    return heads, min(slots, c)


def _static(scores: str | Gumbel | None) -> Any:
    return scores.static if isinstance(scores, Gumbel) else scores


def _kernel(
    refs: Any,
    outputs: Any,
    scratch: Any,
    *,
    capacity: int,
    turned: tuple[str, ...],
    groups: int,
    spec: AttentionSpec,
    scores: str | Gumbel | None,
    integers: bool,
    sinks: int,
) -> None:
    row, block, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    heads, slots = refs["position"].shape[1:]
    gumbel = scores if isinstance(scores, Gumbel) else None

    @pl.when(split == 0)
    def _() -> None:
        for name, value in (("acc", 0.0), ("top", LOWEST / 2), ("total", 0.0)):
            scratch[name][...] = jnp.full(scratch[name].shape, value, jnp.float32)
        if gumbel is not None:
            scratch["noisy_top"][...] = jnp.full(scratch["top"].shape, LOWEST / 2, jnp.float32)
            scratch["noisy_total"][...] = jnp.zeros(scratch["top"].shape, jnp.float32)

    def live(x: Array, along: int) -> Array:
        # Memory beyond the last slot is arbitrary, even NaN, which a weight of 0 does not turn into 0.
        if capacity % slots == 0:
            return x
        here = split * slots + jax.lax.broadcasted_iota(jnp.int32, x.shape, along)
        return jnp.where(here < capacity, x, jnp.zeros_like(x))

    position, query = refs["position"][0], refs["query_position"][row]
    visible = seen(position, query, spec.window)
    if capacity % slots:
        visible &= split * slots + jax.lax.broadcasted_iota(jnp.int32, (heads, slots), 1) < capacity
    v_scale = refs["v_scale"][0] if "v_scale" in refs else None
    k_channels, v_channels = (1 if name in turned else 2 for name in "kv")
    if v_scale is None:
        v = live(refs["v"][0], 3 - v_channels)
    else:
        v, v_scale = refs["v"][0], live(v_scale, 1)

    q = rows_of(refs["q"][0], heads)
    logits, visible = logits_of(
        refs, q, position, visible, query, spec, k_channels, integers, sinks, split * slots, row
    )
    advance(scratch, logits, lambda weights: weighted(weights, v, v_scale, v_channels, integers))
    if gumbel is not None:
        logits = noisy(refs, logits, visible, position, gumbel, row, block * heads)
        advance(scratch, logits, of="noisy_")
    if "logits" in scratch:
        here = slice(None) if slots == capacity else pl.ds(pl.multiple_of(split * slots, slots), slots)
        scratch["logits"][:, :, here] = logits
    elif "logits" in outputs:
        outputs["logits"][0] = logits if len(q) == heads else logits.reshape(heads, slots)

    @pl.when(split == pl.num_programs(2) - 1)
    def _() -> None:
        out, lse = _finish(refs, scratch)
        outputs["out"][0], outputs["lse"][0] = packed(out, heads, groups), along_lanes(lse, heads)
        if scores is None:
            return
        top, total = ("top", "total") if gumbel is None else ("noisy_top", "noisy_total")
        top, total = scratch[top][...], scratch[total][...]
        if "scores_lse" in outputs:
            outputs["scores_lse"][0] = along_lanes(log_sum(top, total), heads)
            return
        used = slice(groups if len(q) == heads else None)
        share = jnp.exp(scratch["logits"][:, used, :capacity] - top[:, used])
        share /= jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[:, used]
        outputs["scores"][0] = share if scores == "each" and len(q) == heads else summed(share, heads)


def _finish(refs: Any, scratch: Any) -> tuple[Array, Array]:
    # Merges slots with low-rank attention, which is one more split.
    top, total, acc = scratch["top"][...], scratch["total"][...], scratch["acc"][...]
    if "phi" in refs:
        z = refs["z"][0]
        phi = rows_of(refs["phi"][0], len(z))
        mass = (phi * beside(z, len(acc))).sum(-1, keepdims=True)
        some = mass > 0
        other = jnp.where(some, jnp.log(jnp.where(some, mass, 1.0)), LOWEST / 2)
        highest = jnp.maximum(top, other)
        kept = jnp.exp(top - highest)
        # phi H is divided by its mass, which is added back as exp(log mass - highest): that cannot overflow.
        added = jnp.where(some, jnp.exp(other - highest) / jnp.where(some, mass, 1.0), 0.0)
        acc = kept * acc + added * of_each(lambda rows: dot(rows, refs["h"][0], 1), phi, len(z))
        total = kept * total + jnp.where(some, jnp.exp(other - highest), 0.0)
        top = highest
    return acc / jnp.maximum(total, jnp.finfo(jnp.float32).tiny), log_sum(top, total)
