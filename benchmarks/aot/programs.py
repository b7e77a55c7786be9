"""Sizes of real models, and odd sizes, at which every operation is compiled for absent chips."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.attention import Partial
from pallas_kernels.less_memory import remember
from pallas_kernels.less_memory.api import Remember
from pallas_kernels.workloads import (
    Setup,
    Shape,
    Workload,
    decode_workload,
    evict_workload,
    feature_workload,
    fused_workload,
    hamming_workload,
    paged_workload,
    prefill_workload,
    rope_workload,
)


def programs() -> Iterator[Workload]:
    """Yield workloads of every operation at sizes of real models, and at odd sizes."""
    half, whole = jnp.bfloat16, jnp.float32
    large = Setup(32, 8, 4, 4096, 128, half)
    short = Setup(64, 32, 1, 208, 128, half)
    multi = Setup(64, 32, 1, 256, 128, half)
    prompt = Setup(1, 8, 4, 8192, 128, half)
    alibi = Setup(2, 4, 4, 1024, 64, whole, slopes=True, scores="each", window=512)
    yield decode_workload("8 heads x 4, 4096 slots, d 128, bfloat16", large)
    yield decode_workload("the same with Gumbel scores and rank 8", large._replace(noisy=True), rank=8)
    yield decode_workload("the same with every probability", large._replace(scores="each"))
    yield decode_workload("multi-head, 256 slots, rank 8", multi._replace(scores="sum"), rank=8)
    yield decode_workload("multi-query x 16, 65536 slots, d 256", Setup(1, 1, 16, 65536, 256, half, scores="sum"))
    latents = Setup(32, 1, 16, 4096, 576, half, scores="sum", shared=True)
    for label, sizes in (("bfloat16", latents), ("8 bits", latents._replace(bits=8))):
        workload = decode_workload(f"latents of 576 x 16, 4096 slots, {label}", sizes)
        yield dataclasses.replace(workload, forms=("tpu",))  # a GPU takes widths up to 256
    yield decode_workload("float32, d 64, ALiBi, window", alibi)
    yield decode_workload("5 tokens of 8 heads x 4, 4096 slots, d 128, bfloat16", large._replace(g=20))
    yield decode_workload("5 tokens of 8 heads x 4, 131072 slots, d 128, bfloat16", Setup(4, 8, 20, 1 << 17, 128, half))
    nine = Setup(8, 2, 63, 4096, 128, half, bits=8)
    yield decode_workload("9 tokens of 2 heads x 7, 4096 slots, d 128, 8 bits", nine)
    yield decode_workload("embedded model, 64 slots", Setup(1, 2, 2, 64, 32, whole, scores="sum"))
    for bits in (8, 4):
        yield decode_workload(f"8 heads x 4, 4096 slots, d 128, {bits} bits", large._replace(bits=bits))
        yield decode_workload(f"multi-head, 256 slots, {bits} bits", multi._replace(bits=bits, scores="sum"))
        yield decode_workload(
            f"float32, 1000 slots, d 64, {bits} bits", Setup(2, 4, 4, 1000, 64, whole, bits=bits, noisy=True)
        )
    yield decode_workload("4096 slots, d 256 and e 64, soft cap", Setup(8, 8, 4, 4096, 256, half, e=64, soft_cap=50.0))
    yield paged_workload("8 heads x 4, 16384 pages of 32, d 128, bfloat16", 32, 8, 4, 16384, 32, 128, half)
    yield paged_workload("32 heads x 1, 28672 pages of 16, d 128, bfloat16", 64, 32, 1, 28672, 16, 128, half)
    yield paged_workload("float32, d 64, 100 pages of 16", 2, 4, 2, 100, 16, 64, whole)
    yield paged_workload("8 heads x 4, 16384 pages of 32, d 128, 8 bits", 32, 8, 4, 16384, 32, 128, half, bits=8)
    yield paged_workload("8 heads x 4, 4096 pages of 32, d 256, 4 bits", 32, 8, 4, 4096, 32, 256, half, bits=4)
    yield evict_workload("8 heads, 4096 slots, d 128, bfloat16", 32, 8, 4096, 128, half)
    yield evict_workload("32 heads, 256 slots, d 128, bfloat16", 64, 32, 256, 128, half)
    yield evict_workload("float32, 16384 slots, d 256", 1, 1, 16384, 256, whole)
    yield evict_workload("int8, 8 heads, 4096 slots, d 128", 32, 8, 4096, 128, jnp.int8)
    yield evict_workload("int4, 8 heads, 4096 slots, d 256, hashes", 32, 8, 4096, 128, jnp.uint8, words=1, keep=True)
    yield evict_workload("4 words a slot, 8 heads, 4096 slots, d 128, bfloat16", 32, 8, 4096, 128, half, words=4)
    yield fused_workload("8 heads x 4, 4096 slots, d 128, bfloat16", large._replace(scores="sum"))
    yield fused_workload(
        "8 heads x 8, 1008 slots, d 128, bfloat16", Setup(32, 8, 8, 1008, 128, half, soft_cap=50.0), keep=True
    )
    yield fused_workload("multi-head, 256 slots, d 128, bfloat16", multi._replace(scores="sum"))
    yield fused_workload("the same with Gumbel scores", multi._replace(noisy=True))
    yield fused_workload("multi-head, 208 slots, 4 sinks, d 128, bfloat16", short, sink_count=4)
    yield fused_workload("the same with ALiBi", short._replace(slopes=True), sink_count=4)
    yield fused_workload("multi-head, 208 slots, pairs that leave, bfloat16", short._replace(scores="sum"), pairs=True)
    yield fused_workload("the same without pairs, in the scores", short._replace(scores="sum"), adds=True)
    yield fused_workload("8 heads x 4, 4096 slots, Gumbel, in the scores", large._replace(noisy=True), adds=True)
    yield fused_workload("multi-head, 208 slots, hashes, bfloat16", short, hashed=16)
    yield fused_workload("8 heads x 4, 4096 slots, hashes of 2 words", large, hashed=64)
    yield fused_workload("float32, d 64, ALiBi, window", alibi)
    yield fused_workload("8 heads x 4, 4096 slots, d 128, 8 bits", large._replace(bits=8, scores="sum"))
    yield fused_workload(
        "multi-head, 208 slots, 8 bits, in the scores", short._replace(bits=8, scores="sum"), adds=True
    )
    yield fused_workload(
        "4096 slots, d 256 and e 128, 4 bits", Setup(32, 8, 2, 4096, 256, half, e=128, bits=4, noisy=True)
    )
    yield fused_workload("embedded model, 16 slots", Setup(1, 2, 2, 16, 32, whole, scores="sum"))
    yield hamming_workload("8 heads x 4, 4096 slots, 16 bits", 32, 8, 4, 4096, 16)
    yield hamming_workload("the same, 64 bits", 32, 8, 4, 4096, 64, keep=True)
    yield prefill_workload("8 heads x 4, 8192 tokens, d 128, bfloat16", prompt)
    yield prefill_workload("the same without scores", prompt, scores=False)
    yield prefill_workload("the same with Gumbel scores at temperature 2", prompt, "noise", tau=2.0)
    yield prefill_workload(
        "512 tokens after 1024 slots, weights",
        Setup(2, 4, 1, 512, 64, half, window=256),
        "weights",
        cached=1024,
    )
    yield prefill_workload("float32, d 256, 1000 tokens", Setup(1, 1, 4, 1000, 256, whole), "noise")
    yield prefill_workload("multi-head, ALiBi, 2048 tokens", Setup(1, 32, 1, 2048, 128, half, slopes=True))
    yield prefill_workload(
        "8 rows of weights, soft cap", Setup(1, 8, 4, 4096, 128, half, soft_cap=50.0), "weights", rows=8
    )
    yield prefill_workload(
        "16 rows of weights, values of 64", Setup(1, 4, 4, 2048, 128, half, e=64), "weights", "noise", rows=16
    )
    yield prefill_workload("a quarter of 8192 tokens, window", prompt._replace(window=1024), readers=4)
    yield prefill_workload(
        "float32, 128 tokens after 262144 slots",
        Setup(1, 1, 1, 128, 64, whole),
        "noise",
        cached=1 << 18,
        tau=2.0,
    )
    yield prefill_workload("embedded model, 48 tokens", Setup(1, 2, 2, 48, 32, whole))
    yield rope_workload("64 rows, 32 heads, d 128, bfloat16", 64, 32, 1, 128, half)
    yield rope_workload("32 rows, 8 heads x 4, d 128, bfloat16", 32, 8, 4, 128, half)
    yield rope_workload("8 rows, 8 heads x 2, d 128, float32", 8, 8, 2, 128, whole)
    yield feature_workload("phi", "one token of 64 rows, 32 heads, d 128", 64, 32, 1, 1, 128, half)
    yield feature_workload("psi", "one token of 64 rows, 32 heads, d 128", 64, 32, 1, 1, 128, half)
    yield remember_workload("64 rows, 32 heads, d 128", 64, 32, 1, 128, half)
    yield remember_workload("32 rows, 8 heads x 4, d 128", 32, 8, 4, 128, half)
    yield remember_workload("one row, 8 heads x 2, d 128", 1, 8, 2, 128, half)
    yield remember_workload("float32, one row, 8 heads x 2, d 64", 1, 8, 2, 64, whole, hidden=256)
    yield feature_workload("phi", "4096 tokens, 8 heads x 4, d 128", 1, 8, 4, 4096, 128, half)
    yield feature_workload("psi", "4096 tokens, 8 heads, d 128", 1, 8, 4, 4096, 128, half)
    yield feature_workload("psi", "float32, d 256, hidden 2048", 1, 1, 1, 100, 256, whole, hidden=2048, rank=16)


def remember_workload(label: str, b: int, h: int, g: int, d: int, dtype: DTypeLike, *, hidden: int = 512) -> Workload:
    """Return a workload of `remember` of `less_memory`, in place, with weights in `dtype`."""
    rank, single = 8, jnp.float32
    pair = Shape((b, h, d), single), Shape((b, h, d), single), Shape((b, h), jnp.int32)
    scales = {name: Shape((h, rank), single) for name in ("outer_scale", "residual_scale")}
    shapes = {
        "memory": (Shape((b, h, rank, d), single), Shape((b, h, rank), single)),
        "evicted": pair,
        "q": Shape((b, h, g, d), dtype),
        "attended": Partial(Shape((b, h, g, d), single), Shape((b, h, g), single)),  # type: ignore[arg-type]
        "of_phi": {"first": Shape((h, g, d, hidden), dtype), "second": Shape((h, g, hidden, rank), dtype)},
        "of_psi": scales
        | {"first": Shape((h, d, hidden), dtype), "second": Shape((h, hidden, rank), dtype)}
        | {"third": Shape((h, rank, rank), single)},
    }
    label = f"remember, {label}"
    return Workload("less_memory", label, remember, shapes, Remember.in_place, forms=("tpu",))
