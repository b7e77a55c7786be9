# Triton compiles these functions itself, and has no types for their arguments.
# pyright: basic
"""Decode attention for GPU in Triton itself, through jax-triton, without Pallas's deprecated Triton lowering.

It has the same splits as `pallas_gpu`, merged by the same code. Importing this module needs Triton.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import AttentionSpec
from pallas_kernels.decode_attention.kernel_parts import stored
from pallas_kernels.decode_attention.partials import ROWS, channels, merged, tile
from pallas_kernels.decode_attention.types import Decoded, Gumbel, LowRank
from pallas_kernels.gpus import capability
from pallas_kernels.operands import Operand


def decode_attention(
    q: Float[Array, "b h g d"],
    k: Operand,
    v: Operand,
    position: Int[Array, "b h c"],
    query_position: Int[Array, " b"],
    spec: AttentionSpec,
    *,
    low_rank: LowRank | None,
    scores: str | Gumbel | None,
    **call: Any,
) -> Decoded:
    """See `api.decode_attention`; `call` goes to `jax_triton.triton_call`."""
    import jax_triton  # cannot be imported if jax is not built for GPU

    b, h, g, d = q.shape
    c, e = v.shape[2:]
    block, split = tile(b * h, c, max(d, e) * q.dtype.itemsize)
    splits = -(-c // split)
    parts = splits + (low_rank is not None)
    gumbel = isinstance(scores, Gumbel)
    nothing = jnp.zeros(1, jnp.float32)  # placeholder for absent arrays, never read
    low = LowRank(nothing, nothing, nothing) if low_rank is None else low_rank
    (keys, k_scale), (values, v_scale) = stored(k), stored(v)
    arrays = [
        q,
        keys,
        values,
        nothing if k_scale is None else k_scale,
        nothing if v_scale is None else v_scale,
        position,
        query_position,
        nothing if spec.slopes is None else spec.slopes.astype(jnp.float32),
        *(x.astype(jnp.float32) for x in low),
        scores.seed if gumbel else jnp.zeros(1, jnp.uint32),
        scores.tau.astype(jnp.float32) if gumbel else nothing,
        scores.first if gumbel and scores.first is not None else jnp.zeros(b, jnp.int32),
    ]
    shapes = {"out": (b, h, parts, ROWS, e), "lse": (b, h, parts, ROWS)}
    shapes |= {"logits": (1,) if scores is None else (b, h, g, c), "noisy_lse": shapes["lse"] if gumbel else (1,)}
    found = jax_triton.triton_call(
        *arrays,
        kernel=kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes.values()],
        grid=(parts, h, b),
        name="decode_attention",
        **settings(q, k, v, spec, low_rank, scores, block, split),
        **{"num_warps": 4, "num_stages": 2, "compute_capability": capability(), **call},
    )
    wanted = ["out", "lse"] + ["logits"] * (scores is not None) + ["noisy_lse"] * gumbel
    named = dict(zip(shapes, found, strict=True))
    return merged({name: named[name] for name in wanted}, g, splits, scores)


def settings(
    q: Float[Array, "b h g d"],
    k: Operand,
    v: Operand,
    spec: AttentionSpec,
    low_rank: LowRank | None,
    scores: str | Gumbel | None,
    block: int,
    split: int,
) -> dict[str, Any]:
    """Return the constants that the kernel is compiled for."""
    (_, h, g, d), (c, e) = q.shape, v.shape[2:]
    gumbel = isinstance(scores, Gumbel)
    pieces = channels(max(16, triton.next_power_of_2(d)), q.dtype)
    return dict(
        HEADS=h,
        GROUPS=g,
        SLOTS=c,
        D=d,
        E=e,
        SPLIT=split,
        SPLITS=triton.cdiv(c, split),
        PARTS=triton.cdiv(c, split) + (low_rank is not None),
        FEATURES=0 if low_rank is None else low_rank.features.shape[-1],
        SCALE=spec.scale,
        CAP=0.0 if spec.soft_cap is None else spec.soft_cap,
        WINDOW=-1 if spec.window is None else spec.window,
        LAYER=scores.layer * 0x9E3779B9 & 0xFFFFFFFF if gumbel else 0,
        ALIBI=spec.slopes is not None,
        K_CODES=stored(k)[1] is not None,
        V_CODES=stored(v)[1] is not None,
        SCORES=scores is not None,
        TEMPERED=gumbel,
        NOISY=gumbel and scores.noise == "gumbel",
        BLOCK=block,
        ROWS=ROWS,
        K_WIDTH=pieces[0].stop,
        HALVED=len(pieces) > 1,
        V_WIDTH=max(16, triton.next_power_of_2(e)),
    )


@triton.jit
def mix(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def log_of(top, total):
    return tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), -3.4028234663852886e38)


@triton.jit
def kernel(
    q,
    k,
    v,
    k_scale,
    v_scale,
    position,
    query_position,
    slopes,
    phi,
    memory,
    z,
    seed,
    tau,
    first,
    out,
    lse,
    logits_out,
    noisy_lse,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    FEATURES: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    LAYER: tl.constexpr,
    ALIBI: tl.constexpr,
    K_CODES: tl.constexpr,
    V_CODES: tl.constexpr,
    SCORES: tl.constexpr,
    TEMPERED: tl.constexpr,
    NOISY: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    K_WIDTH: tl.constexpr,
    HALVED: tl.constexpr,
    V_WIDTH: tl.constexpr,
):
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    LOWEST: tl.constexpr = -3.4028234663852886e38  # type: ignore[assignment]
    # 64 bits: a large batch of long caches has more than 2^31 numbers.
    base = (row * HEADS + head).to(tl.int64)
    rows, channels, columns = tl.arange(0, ROWS), tl.arange(0, K_WIDTH), tl.arange(0, V_WIDTH)
    own, inside = rows < GROUPS, columns < E
    acc = tl.zeros([ROWS, V_WIDTH], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], LOWEST / 2, tl.float32)
    noisy_total = tl.zeros([ROWS], tl.float32)
    noisy_top = tl.full([ROWS], LOWEST / 2, tl.float32)
    if part < SPLITS:
        query = tl.load(query_position + row)
        corner = own[:, None] & (channels < D)[None, :]
        queries = tl.load(q + (base * GROUPS + rows[:, None]) * D + channels[None, :], mask=corner, other=0.0)
        if HALVED:
            corner = own[:, None] & (channels < D - K_WIDTH)[None, :]
            upper = q + (base * GROUPS + rows[:, None]) * D + K_WIDTH + channels[None, :]
            upper = tl.load(upper, mask=corner, other=0.0)
        if ALIBI:
            slope = tl.load(slopes + head * GROUPS + rows, mask=own, other=0.0)
        if TEMPERED:
            temperature = tl.load(tau + row)
        if NOISY:
            stream = mix(tl.load(seed + row).to(tl.uint32) ^ LAYER)
            stream = mix(stream ^ ((head + tl.load(first + row)).to(tl.uint32) * 0x7FEB352D + 1))
        for start in range(part * SPLIT, tl.minimum(part * SPLIT + SPLIT, SLOTS), BLOCK):
            slot = start + tl.arange(0, BLOCK)
            real = slot < SLOTS
            cells = base * SLOTS + slot
            held = real[:, None] & (channels < D)[None, :]
            keys = tl.load(k + cells[:, None] * D + channels[None, :], mask=held, other=0).to(queries.dtype)
            held = real[:, None] & inside[None, :]
            values = tl.load(v + cells[:, None] * E + columns[None, :], mask=held, other=0).to(queries.dtype)
            at = tl.load(position + cells, mask=real, other=-1)
            visible = (at >= 0) & (at <= query)
            if WINDOW >= 0:
                visible = visible & (at > query - WINDOW)
            logits = tl.dot(queries, tl.trans(keys), input_precision="tf32x3")
            if HALVED:
                held = real[:, None] & (channels < D - K_WIDTH)[None, :]
                keys = tl.load(k + cells[:, None] * D + K_WIDTH + channels[None, :], mask=held, other=0)
                logits += tl.dot(upper, tl.trans(keys.to(upper.dtype)), input_precision="tf32x3")
            logits *= SCALE
            if K_CODES:
                logits *= tl.load(k_scale + cells, mask=real, other=0.0)[None, :]
            if CAP > 0:
                logits = CAP * (1 - 2 / (tl.exp(logits * (2 / CAP)) + 1))  # the hyperbolic tangent
            if ALIBI:
                logits += slope[:, None] * (at - query).to(tl.float32)[None, :]
            logits = tl.where(visible[None, :], logits, LOWEST)
            highest = tl.maximum(top, tl.max(logits, 1))
            weights = tl.exp(logits - highest[:, None])
            kept = tl.exp(top - highest)
            total = kept * total + tl.sum(weights, 1)
            if V_CODES:
                weights *= tl.load(v_scale + cells, mask=real, other=0.0)[None, :]
            acc = kept[:, None] * acc + tl.dot(weights.to(values.dtype), values, input_precision="tf32x3")
            top = highest
            if TEMPERED:
                if NOISY:
                    bits = mix(stream ^ (at.to(tl.uint32) * 0x846CA68B + 1))
                    uniform = ((bits >> 9).to(tl.float32) + 0.5) / 8388608.0
                    logits += -tl.log(-tl.log(uniform))[None, :]
                logits = tl.where(visible[None, :], logits / temperature, LOWEST)
                noisy_highest = tl.maximum(noisy_top, tl.max(logits, 1))
                noisy_total = noisy_total * tl.exp(noisy_top - noisy_highest)
                noisy_total += tl.sum(tl.exp(logits - noisy_highest[:, None]), 1)
                noisy_top = noisy_highest
            if SCORES:
                target = logits_out + (base * GROUPS + rows[:, None]) * SLOTS + slot[None, :]
                tl.store(target, logits, mask=own[:, None] & real[None, :])
    elif FEATURES > 0:
        # Low-rank attention is one more split, of mass phi z.
        top = tl.zeros([ROWS], tl.float32)
        for r in range(FEATURES):
            feature = tl.load(phi + (base * GROUPS + rows) * FEATURES + r, mask=own, other=0.0)
            direction = tl.load(memory + (base * FEATURES + r) * E + columns, mask=inside, other=0.0)
            acc += feature[:, None] * direction[None, :]
            total += feature * tl.load(z + base * FEATURES + r)
    some = total > 0
    acc = tl.where(some[:, None], acc / tl.where(some, total, 1.0)[:, None], 0.0)
    place = (base * PARTS + part) * ROWS + rows
    tl.store(out + place[:, None] * E + columns[None, :], acc, mask=inside[None, :])
    tl.store(lse + place, log_of(top, total))
    if TEMPERED:
        tl.store(noisy_lse + place, log_of(noisy_top, noisy_total))
