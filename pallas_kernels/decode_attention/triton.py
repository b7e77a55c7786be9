# Triton compiles these functions itself, and has no types for their arguments.
# pyright: basic
"""Decode attention for GPU in Triton itself, through jax-triton, without Pallas's deprecated Triton lowering.

It has the same splits as `pallas_gpu`, merged by the same code. Importing this module needs Triton.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.common import capability
from pallas_kernels.decode_attention.api import DecodeAttention, Decoded, LowRank
from pallas_kernels.decode_attention.kernel_parts import array_and_scale
from pallas_kernels.decode_attention.splits import SplitOutputs, channels, merge_splits, rows_of, split_of, tile


@dataclasses.dataclass(frozen=True)
class Constants:
    """Constants that the kernel is compiled for."""

    heads: int
    groups: int
    slots: int
    d: int
    e: int
    split: int
    splits: int
    parts: int
    features: int
    scale: float
    cap: float
    """0 without a soft cap."""
    window: int
    """-1 without a window."""
    layer: int
    """The layer's part of the seed."""
    slopes: bool
    k_codes: bool
    v_codes: bool
    scores: bool
    tempered: bool
    noisy: bool
    block: int
    """Slots of one step."""
    rows: int
    k_width: int
    """Channels of queries and keys that are multiplied at a time, `halved` if those are half of them."""
    halved: bool
    v_width: int


def decode_attention(x: DecodeAttention, *, interpret: Any = False, **call: Any) -> Decoded:
    """See `api.decode_attention`; `call` goes to `jax_triton.triton_call`, which has no interpreter."""
    import jax_triton  # cannot be imported if jax is not built for GPU

    (b, h, g, _), e, noise = x.q.shape, x.values.shape[-1], x.score_noise
    constants = constants_of(x)
    absent = jnp.zeros(1, jnp.float32)  # placeholder for absent arrays, never read
    low = LowRank(absent, absent, absent) if x.low_rank is None else x.low_rank
    (keys, k_scale), (values, v_scale) = array_and_scale(x.k), array_and_scale(x.values)
    arrays = [
        x.q,
        keys,
        values,
        absent if k_scale is None else k_scale,
        absent if v_scale is None else v_scale,
        x.position,
        x.query_position,
        absent if x.spec.slopes is None else x.spec.slopes.astype(jnp.float32),
        *(y.astype(jnp.float32) for y in low),
        jnp.zeros(1, jnp.uint32) if noise is None else noise.seed,
        absent if noise is None else noise.tau.astype(jnp.float32),
        jnp.zeros(b, jnp.int32) if noise is None or noise.first is None else noise.first,
    ]
    lse = (b, h, constants.parts, constants.rows)
    logits, noisy_lse = (b, h, g, constants.slots) if constants.scores else (1,), (1,) if noise is None else lse
    outputs = jax_triton.triton_call(
        *arrays,
        kernel=kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*lse, e), lse, logits, noisy_lse)],
        grid=(constants.parts, h, b),
        name="decode_attention",
        s=constants,
        **{"num_warps": 4, "num_stages": 2, "compute_capability": capability(), **call},
    )
    outputs = SplitOutputs(*outputs)
    return merge_splits(
        outputs if noise is not None else outputs._replace(noisy_lse=None), g, constants.splits, x.scores
    )


def constants_of(x: DecodeAttention) -> Constants:
    """Return the constants for these arguments."""
    (b, h, g, d), (c, e), noise = x.q.shape, x.values.shape[2:], x.score_noise
    block, splits = tile(b * h, c, max(d, e) * x.q.dtype.itemsize)
    pieces = channels(max(16, triton.next_power_of_2(d)), x.q.dtype)
    return Constants(
        heads=h,
        groups=g,
        slots=c,
        d=d,
        e=e,
        split=split_of(c, splits, block),
        splits=splits,
        parts=splits + (x.low_rank is not None),
        features=0 if x.low_rank is None else x.low_rank.features.shape[-1],
        scale=x.spec.scale,
        cap=0.0 if x.spec.soft_cap is None else x.spec.soft_cap,
        window=-1 if x.spec.window is None else x.spec.window,
        layer=0 if noise is None else noise.layer * 0x9E3779B9 & 0xFFFFFFFF,
        slopes=x.spec.slopes is not None,
        k_codes=array_and_scale(x.k)[1] is not None,
        v_codes=array_and_scale(x.values)[1] is not None,
        scores=x.scores is not None,
        tempered=noise is not None,
        noisy=noise is not None and noise.kind == "gumbel",
        block=block,
        rows=rows_of(g),
        k_width=pieces[0].stop,
        halved=len(pieces) > 1,
        v_width=max(16, triton.next_power_of_2(e)),
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
    s: tl.constexpr,
):
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    LOWEST: tl.constexpr = -3.4028234663852886e38  # type: ignore[assignment]
    # Triton 3.6 takes no fields of a tuple as sizes.
    HEIGHT: tl.constexpr = s.rows  # type: ignore[assignment]
    WIDTH: tl.constexpr = s.v_width  # type: ignore[assignment]
    # 64 bits: a large batch of long caches has more than 2^31 numbers.
    base = (row * s.heads + head).to(tl.int64)
    rows, channels, columns = tl.arange(0, s.rows), tl.arange(0, s.k_width), tl.arange(0, s.v_width)
    real_rows, inside = rows < s.groups, columns < s.e
    acc = tl.zeros([HEIGHT, WIDTH], tl.float32)
    total = tl.zeros([HEIGHT], tl.float32)
    top = tl.full([HEIGHT], LOWEST / 2, tl.float32)
    noisy_total = tl.zeros([HEIGHT], tl.float32)
    noisy_top = tl.full([HEIGHT], LOWEST / 2, tl.float32)
    if part < s.splits:
        query = tl.load(query_position + row)
        corner = real_rows[:, None] & (channels < s.d)[None, :]
        queries = tl.load(q + (base * s.groups + rows[:, None]) * s.d + channels[None, :], mask=corner, other=0.0)
        if s.halved:
            corner = real_rows[:, None] & (channels < s.d - s.k_width)[None, :]
            upper = q + (base * s.groups + rows[:, None]) * s.d + s.k_width + channels[None, :]
            upper = tl.load(upper, mask=corner, other=0.0)
        if s.slopes:
            slope = tl.load(slopes + head * s.groups + rows, mask=real_rows, other=0.0)
        if s.tempered:
            temperature = tl.load(tau + row)
        if s.noisy:
            stream = mix(tl.load(seed + row).to(tl.uint32) ^ s.layer)
            stream = mix(stream ^ ((head + tl.load(first + row)).to(tl.uint32) * 0x7FEB352D + 1))
        for start in range(part * s.split, tl.minimum(part * s.split + s.split, s.slots), s.block):
            slot = start + tl.arange(0, s.block)
            real = slot < s.slots
            cells = base * s.slots + slot
            mask = real[:, None] & (channels < s.d)[None, :]
            keys = tl.load(k + cells[:, None] * s.d + channels[None, :], mask=mask, other=0).to(queries.dtype)
            mask = real[:, None] & inside[None, :]
            values = tl.load(v + cells[:, None] * s.e + columns[None, :], mask=mask, other=0).to(queries.dtype)
            at = tl.load(position + cells, mask=real, other=-1)
            visible = (at >= 0) & (at <= query)
            if s.window >= 0:
                visible = visible & (at > query - s.window)
            logits = tl.dot(queries, tl.trans(keys), input_precision="tf32x3")
            if s.halved:
                mask = real[:, None] & (channels < s.d - s.k_width)[None, :]
                keys = tl.load(k + cells[:, None] * s.d + s.k_width + channels[None, :], mask=mask, other=0)
                logits += tl.dot(upper, tl.trans(keys.to(upper.dtype)), input_precision="tf32x3")
            logits *= s.scale
            if s.k_codes:
                logits *= tl.load(k_scale + cells, mask=real, other=0.0)[None, :]
            if s.cap > 0:
                logits = s.cap * (1 - 2 / (tl.exp(logits * (2 / s.cap)) + 1))  # the hyperbolic tangent
            if s.slopes:
                logits += slope[:, None] * (at - query).to(tl.float32)[None, :]
            logits = tl.where(visible[None, :], logits, LOWEST)
            highest = tl.maximum(top, tl.max(logits, 1))
            weights = tl.exp(logits - highest[:, None])
            correction = tl.exp(top - highest)
            total = correction * total + tl.sum(weights, 1)
            if s.v_codes:
                weights *= tl.load(v_scale + cells, mask=real, other=0.0)[None, :]
            acc = correction[:, None] * acc + tl.dot(weights.to(values.dtype), values, input_precision="tf32x3")
            top = highest
            if s.tempered:
                if s.noisy:
                    bits = mix(stream ^ (at.to(tl.uint32) * 0x846CA68B + 1))
                    uniform = ((bits >> 9).to(tl.float32) + 0.5) / 8388608.0
                    logits += -tl.log(-tl.log(uniform))[None, :]
                logits = tl.where(visible[None, :], logits / temperature, LOWEST)
                noisy_highest = tl.maximum(noisy_top, tl.max(logits, 1))
                noisy_total = noisy_total * tl.exp(noisy_top - noisy_highest)
                noisy_total += tl.sum(tl.exp(logits - noisy_highest[:, None]), 1)
                noisy_top = noisy_highest
            if s.scores:
                target = logits_out + (base * s.groups + rows[:, None]) * s.slots + slot[None, :]
                tl.store(target, logits, mask=real_rows[:, None] & real[None, :])
    elif s.features > 0:
        # Low-rank attention is one more split, of mass phi z.
        top = tl.zeros([HEIGHT], tl.float32)
        for r in range(s.features):
            feature = tl.load(phi + (base * s.groups + rows) * s.features + r, mask=real_rows, other=0.0)
            direction = tl.load(memory + (base * s.features + r) * s.e + columns, mask=inside, other=0.0)
            acc += feature[:, None] * direction[None, :]
            total += feature * tl.load(z + base * s.features + r)
    nonempty = total > 0
    acc = tl.where(nonempty[:, None], acc / tl.where(nonempty, total, 1.0)[:, None], 0.0)
    place = (base * s.parts + part) * s.rows + rows
    tl.store(out + place[:, None] * s.e + columns[None, :], acc, mask=inside[None, :])
    tl.store(lse + place, log_of(top, total))
    if s.tempered:
        tl.store(noisy_lse + place, log_of(noisy_top, noisy_total))
