"""Sizes of real models, and odd sizes, at which every operation is compiled for absent chips."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.attention import Partial
from pallas_kernels.less_kernels import remember
from pallas_kernels.less_kernels.api import Remember
from pallas_kernels.workloads import (
    Shape,
    Sizes,
    Workload,
    decode,
    eviction,
    features,
    hashes,
    paged,
    prefill,
    rotating,
    stepping,
)


def programs() -> Iterator[Workload]:
    """Yield workloads of every operation at sizes of real models, and at odd sizes."""
    half, whole = jnp.bfloat16, jnp.float32
    large = Sizes(32, 8, 4, 4096, 128, half)
    short = Sizes(64, 32, 1, 208, 128, half)
    multi = Sizes(64, 32, 1, 256, 128, half)
    prompt = Sizes(1, 8, 4, 8192, 128, half)
    alibi = Sizes(2, 4, 4, 1024, 64, whole, slopes=True, scores="each", window=512)
    yield decode("8 heads x 4, 4096 slots, d 128, bfloat16", large)
    yield decode("the same with Gumbel scores and rank 8", large._replace(noisy=True), rank=8)
    yield decode("the same with every probability", large._replace(scores="each"))
    yield decode("multi-head, 256 slots, rank 8", multi._replace(scores="sum"), rank=8)
    yield decode("multi-query x 16, 65536 slots, d 256", Sizes(1, 1, 16, 65536, 256, half, scores="sum"))
    yield decode("float32, d 64, ALiBi, window", alibi)
    yield decode("embedded model, 64 slots", Sizes(1, 2, 2, 64, 32, whole, scores="sum"))
    for bits in (8, 4):
        yield decode(f"8 heads x 4, 4096 slots, d 128, {bits} bits", large._replace(bits=bits))
        yield decode(f"multi-head, 256 slots, {bits} bits", multi._replace(bits=bits, scores="sum"))
        yield decode(f"float32, 1000 slots, d 64, {bits} bits", Sizes(2, 4, 4, 1000, 64, whole, bits=bits, noisy=True))
    yield decode("4096 slots, d 256 and e 64, soft cap", Sizes(8, 8, 4, 4096, 256, half, e=64, soft_cap=50.0))
    yield paged("8 heads x 4, 16384 pages of 32, d 128, bfloat16", 32, 8, 4, 16384, 32, 128, half)
    yield paged("32 heads x 1, 28672 pages of 16, d 128, bfloat16", 64, 32, 1, 28672, 16, 128, half)
    yield paged("float32, d 64, 100 pages of 16", 2, 4, 2, 100, 16, 64, whole)
    yield paged("8 heads x 4, 16384 pages of 32, d 128, 8 bits", 32, 8, 4, 16384, 32, 128, half, bits=8)
    yield paged("8 heads x 4, 4096 pages of 32, d 256, 4 bits", 32, 8, 4, 4096, 32, 256, half, bits=4)
    yield eviction("8 heads, 4096 slots, d 128, bfloat16", 32, 8, 4096, 128, half)
    yield eviction("32 heads, 256 slots, d 128, bfloat16", 64, 32, 256, 128, half)
    yield eviction("float32, 16384 slots, d 256", 1, 1, 16384, 256, whole)
    yield eviction("int8, 8 heads, 4096 slots, d 128", 32, 8, 4096, 128, jnp.int8)
    yield eviction("int4, 8 heads, 4096 slots, d 256, hashes", 32, 8, 4096, 128, jnp.uint8, words=1, keep=True)
    yield eviction("4 words a slot, 8 heads, 4096 slots, d 128, bfloat16", 32, 8, 4096, 128, half, words=4)
    yield stepping("8 heads x 4, 4096 slots, d 128, bfloat16", large._replace(scores="sum"))
    yield stepping(
        "8 heads x 8, 1008 slots, d 128, bfloat16", Sizes(32, 8, 8, 1008, 128, half, soft_cap=50.0), keep=True
    )
    yield stepping("multi-head, 256 slots, d 128, bfloat16", multi._replace(scores="sum"))
    yield stepping("the same with Gumbel scores", multi._replace(noisy=True))
    yield stepping("multi-head, 208 slots, 4 sinks, d 128, bfloat16", short, apart=4)
    yield stepping("the same with ALiBi", short._replace(slopes=True), apart=4)
    yield stepping("multi-head, 208 slots, pairs that leave, bfloat16", short._replace(scores="sum"), pairs=True)
    yield stepping("the same without pairs, in the scores", short._replace(scores="sum"), adds=True)
    yield stepping("8 heads x 4, 4096 slots, Gumbel, in the scores", large._replace(noisy=True), adds=True)
    yield stepping("multi-head, 208 slots, hashes, bfloat16", short, hashed=16)
    yield stepping("8 heads x 4, 4096 slots, hashes of 2 words", large, hashed=64)
    yield stepping("float32, d 64, ALiBi, window", alibi)
    yield stepping("8 heads x 4, 4096 slots, d 128, 8 bits", large._replace(bits=8, scores="sum"))
    yield stepping("multi-head, 208 slots, 8 bits, in the scores", short._replace(bits=8, scores="sum"), adds=True)
    yield stepping("4096 slots, d 256 and e 128, 4 bits", Sizes(32, 8, 2, 4096, 256, half, e=128, bits=4, noisy=True))
    yield stepping("embedded model, 16 slots", Sizes(1, 2, 2, 16, 32, whole, scores="sum"))
    yield hashes("8 heads x 4, 4096 slots, 16 bits", 32, 8, 4, 4096, 16)
    yield hashes("the same, 64 bits", 32, 8, 4, 4096, 64, keep=True)
    yield prefill("8 heads x 4, 8192 tokens, d 128, bfloat16", prompt)
    yield prefill("the same without scores", prompt, scores=False)
    yield prefill("the same with Gumbel scores at temperature 2", prompt, "noise", tau=2.0)
    yield prefill(
        "512 tokens after 1024 slots, weights", Sizes(2, 4, 1, 512, 64, half, window=256), "weights", cached=1024
    )
    yield prefill("float32, d 256, 1000 tokens", Sizes(1, 1, 4, 1000, 256, whole), "noise")
    yield prefill("multi-head, ALiBi, 2048 tokens", Sizes(1, 32, 1, 2048, 128, half, slopes=True))
    yield prefill("8 rows of weights, soft cap", Sizes(1, 8, 4, 4096, 128, half, soft_cap=50.0), "weights", rows=8)
    yield prefill(
        "16 rows of weights, values of 64", Sizes(1, 4, 4, 2048, 128, half, e=64), "weights", "noise", rows=16
    )
    yield prefill("a quarter of 8192 tokens, window", prompt._replace(window=1024), readers=4)
    yield prefill(
        "float32, 128 tokens after 262144 slots", Sizes(1, 1, 1, 128, 64, whole), "noise", cached=1 << 18, tau=2.0
    )
    yield prefill("embedded model, 48 tokens", Sizes(1, 2, 2, 48, 32, whole))
    yield rotating("64 rows, 32 heads, d 128, bfloat16", 64, 32, 1, 128, half)
    yield rotating("32 rows, 8 heads x 4, d 128, bfloat16", 32, 8, 4, 128, half)
    yield rotating("8 rows, 8 heads x 2, d 128, float32", 8, 8, 2, 128, whole)
    yield features("phi", "one token of 64 rows, 32 heads, d 128", 64, 32, 1, 1, 128, half)
    yield features("psi", "one token of 64 rows, 32 heads, d 128", 64, 32, 1, 1, 128, half)
    yield remembering("64 rows, 32 heads, d 128", 64, 32, 1, 128, half)
    yield remembering("32 rows, 8 heads x 4, d 128", 32, 8, 4, 128, half)
    yield remembering("one row, 8 heads x 2, d 128", 1, 8, 2, 128, half)
    yield remembering("float32, one row, 8 heads x 2, d 64", 1, 8, 2, 64, whole, hidden=256)
    yield features("phi", "4096 tokens, 8 heads x 4, d 128", 1, 8, 4, 4096, 128, half)
    yield features("psi", "4096 tokens, 8 heads, d 128", 1, 8, 4, 4096, 128, half)
    yield features("psi", "float32, d 256, hidden 2048", 1, 1, 1, 100, 256, whole, hidden=2048, rank=16)


def remembering(label: str, b: int, h: int, g: int, d: int, dtype: DTypeLike, *, hidden: int = 512) -> Workload:
    """Return a workload of `remember` of `less_kernels`, in place, with weights in `dtype`."""
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
    return Workload("less_kernels", label, remember, shapes, Remember.in_place, forms=("tpu",))
