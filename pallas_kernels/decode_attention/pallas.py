"""Decode attention for TPU: slots pass through on-chip memory once; logits stay there until they are scores.

The grid is (rows, blocks of heads, splits of slots); the last axis runs in order, so that running maxima and sums stay
in scratch memory.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import noise
from pallas_kernels.common import LANES, SUBLANES, padded, slots_lie_along_lanes
from pallas_kernels.decode_attention.types import Decoded, Gumbel, LowRank

BLOCK_BYTES = 1 << 20
"""Keys of one grid step, about; values as many, and both twice while the next ones arrive."""
HELD_BYTES = 4 << 20
"""Logits that stay on the chip until their row is done; longer rows write them out and are scored by XLA."""
VMEM_BYTES = 14 << 20
LOWEST = float(jnp.finfo(jnp.float32).min)


def decode_attention(
    q: Float[Array, "b h g d"],
    k: Float[Array, "b h c d"],
    v: Float[Array, "b h c d"],
    position: Int[Array, "b h c"],
    query_position: Int[Array, " b"],
    *,
    window: int | None,
    slopes: Float[Array, "h g"] | None,
    low_rank: LowRank | None,
    scores: str | Gumbel | None,
    interpret: Any,
) -> Decoded:
    """See `api.decode_attention`."""
    b, h, g, d = q.shape
    c = k.shape[2]
    heads, slots = tile(h, c, d, k.dtype.itemsize)
    splits, rows = pl.cdiv(c, slots), padded(g, SUBLANES)
    held = 4 * heads * rows * splits * slots
    keep = scores is not None and held <= HELD_BYTES

    def pad(x: Array) -> Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rows - g), (0, 0)])

    def of_heads(*tail: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, heads, *tail), lambda b, h, s: (b, h) + (0,) * len(tail))

    # For XLA a swap of what already lies that way; the other way it would copy the cache at every step.
    turned = slots_lie_along_lanes(c, d)
    if turned:
        k, v = jnp.swapaxes(k, 2, 3), jnp.swapaxes(v, 2, 3)
        per_slot = pl.BlockSpec((1, heads, d, slots), lambda b, h, s: (b, h, 0, s))
    else:
        per_slot = pl.BlockSpec((1, heads, slots, d), lambda b, h, s: (b, h, s, 0))
    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    inputs: dict[str, tuple[Array, pl.BlockSpec]] = {
        "query_position": (query_position, scalars),
        "q": (pad(q), of_heads(rows, d)),
        "k": (k, per_slot),
        "v": (v, per_slot),
        "position": (position, pl.BlockSpec((1, heads, slots), lambda b, h, s: (b, h, s))),
    }
    if slopes is not None:
        block = pl.BlockSpec((heads, rows, 1), lambda b, h, s: (h, 0, 0))
        inputs["slopes"] = (pad(slopes.astype(jnp.float32)[..., None]), block)
    if low_rank is not None:
        features = low_rank.features.shape[-1]
        inputs["phi"] = (pad(low_rank.features.astype(jnp.float32)), of_heads(rows, features))
        inputs["h"] = (low_rank.h.astype(jnp.float32), of_heads(features, d))
        inputs["z"] = (low_rank.z.astype(jnp.float32)[:, :, None], of_heads(1, features))
    if isinstance(scores, Gumbel):
        inputs["seed"] = (jax.lax.bitcast_convert_type(scores.seed, jnp.int32), scalars)
        inputs["tau"] = (scores.tau.astype(jnp.float32), scalars)

    outputs: dict[str, tuple[tuple[int, ...], pl.BlockSpec]] = {
        "out": ((b, h, rows, d), of_heads(rows, d)),
        "lse": ((b, h, rows, 1), of_heads(rows, 1)),
    }
    scratch = {"acc": (heads, rows, d), "top": (heads, rows, 1), "total": (heads, rows, 1)}
    if isinstance(scores, Gumbel):
        scratch |= {"noisy_top": (heads, rows, 1), "noisy_total": (heads, rows, 1)}
    if keep:
        shape = (g, c) if scores == "each" else (c,)
        outputs["scores"] = ((b, h, *shape), of_heads(*shape))
        scratch["logits"] = (heads, rows, splits * slots)
    elif scores is not None:
        outputs["logits"] = (
            (b, h, rows, c),
            pl.BlockSpec((1, heads, rows, slots), lambda b, h, s: (b, h, 0, s)),
        )
        outputs["scores_lse"] = ((b, h, rows, 1), of_heads(rows, 1))

    kernel = functools.partial(_kernel, capacity=c, turned=turned, groups=g, window=window, scores=_static(scores))
    called = pl.pallas_call(
        kernel,
        grid=(b, pl.cdiv(h, heads), splits),
        in_specs=[{name: spec for name, (_, spec) in inputs.items()}],
        out_specs={name: spec for name, (_, spec) in outputs.items()},
        out_shape={name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, (shape, _) in outputs.items()},
        scratch_shapes=[{name: pltpu.VMEM(shape, jnp.float32) for name, shape in scratch.items()}],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="decode_attention",
    )
    found = called({name: array for name, (array, _) in inputs.items()})
    result = found.get("scores")
    if "logits" in found:
        # Rows too long for the chip's memory: an elementwise epilogue.
        finite = jnp.where(jnp.isfinite(found["scores_lse"]), found["scores_lse"], 0.0)
        result = jnp.exp(found["logits"] - finite)[:, :, :g]
        result = result if scores == "each" else result.sum(2)
    return Decoded(found["out"][:, :, :g], found["lse"][:, :, :g, 0], result)


def tile(h: int, c: int, d: int, itemsize: int) -> tuple[int, int]:
    """KV heads and slots of one grid step."""
    heads = SUBLANES if h % SUBLANES == 0 else h
    slots = max(LANES, BLOCK_BYTES // (heads * d * itemsize) // LANES * LANES)
    return heads, min(slots, c)


def _static(scores: str | Gumbel | None) -> Any:
    return scores._replace(seed=None, tau=None) if isinstance(scores, Gumbel) else scores  # type: ignore[arg-type]


def _kernel(refs, outputs, scratch, *, capacity, turned, groups, window, scores):
    row, block, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    heads, slots = refs["position"].shape[1:]
    along = 2 if turned else 1
    gumbel = isinstance(scores, Gumbel)

    @pl.when(split == 0)
    def _():
        for name, value in (("acc", 0.0), ("top", LOWEST / 2), ("total", 0.0)):
            scratch[name][...] = jnp.full(scratch[name].shape, value, jnp.float32)
        if gumbel:
            scratch["noisy_top"][...] = jnp.full(scratch["top"].shape, LOWEST / 2, jnp.float32)
            scratch["noisy_total"][...] = jnp.zeros(scratch["top"].shape, jnp.float32)

    position, query = refs["position"][0], refs["query_position"][row]
    visible = (position >= 0) & (position <= query)
    if window is not None:
        visible &= position > query - window
    k, v = refs["k"][0], refs["v"][0]
    if capacity % slots:
        here = split * slots + jax.lax.broadcasted_iota(jnp.int32, (heads, slots), 1)
        visible &= here < capacity
        # Beyond the last slot lies anything, even NaN, which no weight of 0 would make 0.
        here = split * slots + jax.lax.broadcasted_iota(jnp.int32, v.shape, along)
        v = jnp.where(here < capacity, v, jnp.zeros_like(v))
    visible = jnp.broadcast_to(visible[:, None, :], (heads, refs["q"].shape[2], slots))

    logits = _dot(refs["q"][0], k, 3 - along) / math.sqrt(refs["q"].shape[-1])
    if "slopes" in refs:
        logits += refs["slopes"][...] * (position - query).astype(jnp.float32)[:, None, :]
    logits = jnp.where(visible, logits, LOWEST)
    highest = jnp.maximum(scratch["top"][...], logits.max(-1, keepdims=True))
    weights = jnp.exp(logits - highest)
    kept = jnp.exp(scratch["top"][...] - highest)
    scratch["total"][...] = kept * scratch["total"][...] + weights.sum(-1, keepdims=True)
    scratch["acc"][...] = kept * scratch["acc"][...] + _dot(weights.astype(v.dtype), v, along)
    scratch["top"][...] = highest

    if gumbel:
        zeta = _zeta(scores, refs["seed"][row], block * heads, position)
        logits = jnp.where(visible, (logits + zeta[:, None, :]) / refs["tau"][row], LOWEST)
        highest = jnp.maximum(scratch["noisy_top"][...], logits.max(-1, keepdims=True))
        kept = jnp.exp(scratch["noisy_top"][...] - highest)
        total = jnp.exp(logits - highest).sum(-1, keepdims=True)
        scratch["noisy_total"][...] = kept * scratch["noisy_total"][...] + total
        scratch["noisy_top"][...] = highest
    if "logits" in scratch:
        here = slice(None) if slots == capacity else pl.ds(pl.multiple_of(split * slots, slots), slots)
        scratch["logits"][:, :, here] = logits
    elif "logits" in outputs:
        outputs["logits"][0] = logits

    @pl.when(split == pl.num_programs(2) - 1)
    def _():
        out, lse = _finish(refs, scratch)
        outputs["out"][0], outputs["lse"][0] = out, lse
        if scores is None:
            return
        top, total = ("noisy_top", "noisy_total") if gumbel else ("top", "total")
        top, total = scratch[top][...], scratch[total][...]
        if "scores_lse" in outputs:
            outputs["scores_lse"][0] = _log(top, total)
            return
        share = jnp.exp(scratch["logits"][:, :groups, :capacity] - top[:, :groups])
        share /= jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[:, :groups]
        outputs["scores"][0] = share if scores == "each" else share.sum(1)


def _finish(refs, scratch):
    # Slots, and the low-rank share as one more split.
    top, total, acc = scratch["top"][...], scratch["total"][...], scratch["acc"][...]
    if "phi" in refs:
        phi = refs["phi"][0]
        mass = (phi * refs["z"][0]).sum(-1, keepdims=True)
        some = mass > 0
        other = jnp.where(some, jnp.log(jnp.where(some, mass, 1.0)), LOWEST / 2)
        highest = jnp.maximum(top, other)
        kept = jnp.exp(top - highest)
        # Of phi H only the direction counts: its mass comes in as exp(log mass - highest), which cannot overflow.
        added = jnp.where(some, jnp.exp(other - highest) / jnp.where(some, mass, 1.0), 0.0)
        acc = kept * acc + added * _dot(phi, refs["h"][0], 1)
        total = kept * total + jnp.where(some, jnp.exp(other - highest), 0.0)
        top = highest
    return acc / jnp.maximum(total, jnp.finfo(jnp.float32).tiny), _log(top, total)


def _log(top, total):
    some = total > 0
    return jnp.where(some, top + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)


def _dot(a, b, axis):
    # Float32 is not rounded to bfloat16 on its way through the matrix unit.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((2,), (axis,)), ((0,), (0,)))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _zeta(gumbel, seed, first_head, position):
    if gumbel.noise == "none":
        return jnp.zeros(position.shape, jnp.float32)
    seed = jax.lax.bitcast_convert_type(jnp.full(position.shape, seed, jnp.int32), jnp.uint32)
    head = (first_head + jax.lax.broadcasted_iota(jnp.int32, position.shape, 0)).astype(jnp.uint32)
    bits = noise.hashed_bits(seed, gumbel.layer, head, position.astype(jnp.uint32))
    uniform = ((bits >> 9).astype(jnp.int32).astype(jnp.float32) + 0.5) / 2**23
    return {"gumbel": noise.gumbel, "gaussian": noise.gaussian}[gumbel.noise](uniform)
