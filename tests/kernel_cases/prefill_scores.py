"""Prompt attention with column sums: cases, and the operation in float64 NumPy."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from pallas_kernels.prefill_scores import prefill_scores
from tests.kernel_cases.decode_attention import softmax
from tests.kernels import GPU_WAYS, TPU_WAYS, XLA, Case, normal


def oracle(inputs: dict[str, Any], *, tau: float = 1.0, window: int | None = None, scores: bool = True):
    """The whole matrix at once."""
    q, k, v = (inputs[name] for name in "qkv")
    (b, h, _, n, d), c = q.shape, k.shape[2]
    key = np.broadcast_to(inputs["key_position"], (b, h, c))[:, :, None, None]
    query = inputs["query_position"][:, None, None, :, None]
    visible = (key >= 0) & (key <= query) & (key > query - (window or 2**30))
    x = np.einsum("bhgnd,bhcd->bhgnc", q, k) / math.sqrt(d)
    if "slopes" in inputs:
        x = x + inputs["slopes"][:, :, None, None] * (key - query)
    probs, lse = softmax(x, np.broadcast_to(visible, x.shape))
    found = {"out": np.einsum("bhgnc,bhcd->bhgnd", probs, v), "lse": lse}
    if scores:
        noise = inputs.get("noise", np.zeros((b, h, c)))[:, :, None, None]
        tempered, _ = softmax((x + noise) / tau, np.broadcast_to(visible, x.shape))
        weights = np.broadcast_to(inputs.get("weights", np.ones((b, 1, n))), (b, h, n))
        found["scores"] = np.einsum("bhgnc,bhn->bhgc", tempered, weights)
    return found


def run(inputs: dict[str, Any], **options: Any) -> dict[str, Any]:
    found = prefill_scores(**inputs, **options)
    return {name: value for name, value in found._asdict().items() if value is not None}


def inputs(
    b: int, h: int, g: int, n: int, d: int, *, cached: int = 0, dtype: str = "float32", padding: bool = True
) -> dict[str, Any]:
    """A prompt after `cached` slots in no order, some of them empty; every row but the first ends in padding."""
    rng = np.random.default_rng(b * 1000 + h * 100 + g * 10 + n + cached + d)
    start, c = 2 * cached, cached + n
    query = start + np.arange(n) - np.zeros((b, 1), int)
    if padding:
        query[1:][np.arange(n) >= rng.integers(1, n + 1, size=(b - 1, 1))] = -1
    key = np.broadcast_to(query[:, None], (b, h, n))
    if cached:
        slots = np.stack([[rng.permutation(start)[:cached] for _ in range(h)] for _ in range(b)])
        key = np.concatenate([np.where(rng.random(slots.shape) < 0.3, -1, slots), key], -1)
    return dict(
        q=normal(rng, (b, h, g, n, d), dtype),
        k=normal(rng, (b, h, c, d), dtype),
        v=normal(rng, (b, h, c, d), dtype),
        query_position=query.astype(np.int32),
        key_position=key.astype(np.int32),
    )


def case(label: str, *shape: int, extra: tuple[str, ...] = (), ways: tuple = (XLA, *TPU_WAYS), **options: Any) -> Case:
    """Random inputs; `extra` names optional arrays."""
    settings = {name: options.pop(name) for name in ("tau", "window", "scores") if name in options}
    made = inputs(*shape, **options)
    b, h, g, n, _ = shape
    rng = np.random.default_rng(len(label))
    if "noise" in extra:
        made["noise"] = rng.gumbel(size=(b, h, made["k"].shape[2])).astype(np.float32)
    if "weights" in extra:  # none of the first half, as in SnapKV, so that whole blocks count nothing
        weights = rng.random((b, h, n)) * (np.arange(n) >= n // 2)
        made["weights"] = weights.astype(np.float32)
    ways = (*ways, *GPU_WAYS) if shape[-1] >= 16 else ways
    if "slopes" in extra:
        made["slopes"] = 2.0 ** -rng.integers(1, 8, size=(h, g)).astype(np.float32)
    dtype = options.get("dtype", "float32")
    return Case(
        "prefill_scores", label, (made,), partial(run, **settings), partial(oracle, **settings), ways=ways, dtype=dtype
    )


CASES = (
    case("plain", 2, 1, 2, 200, 16),
    case("one-token", 1, 1, 1, 1, 8),
    case("many-blocks", 1, 1, 1, 600, 8),
    case("no-scores", 1, 2, 2, 130, 16, scores=False),
    case("noise", 2, 2, 2, 150, 16, extra=("noise", "weights")),
    case("cold", 1, 1, 2, 300, 8, extra=("noise",), tau=0.25),
    case("hot", 1, 1, 1, 140, 8, tau=2.0),
    case("window", 1, 1, 2, 300, 8, window=40, extra=("weights",)),
    case("after-a-cache", 2, 2, 2, 140, 8, cached=48, window=100),
    case("alibi", 2, 2, 3, 90, 16, cached=16, extra=("slopes",)),
    case("bfloat16", 2, 1, 4, 160, 64, dtype="bfloat16", extra=("noise",)),
    case("one-key-for-all-heads-of-many", 1, 8, 1, 140, 8, extra=("weights",)),
)
