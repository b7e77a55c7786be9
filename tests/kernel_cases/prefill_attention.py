"""Prompt attention with column sums: cases, and the operation in float64 NumPy."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from pallas_kernels.attention import AttentionSpec
from pallas_kernels.operands import LazyRope, Quantised, SplitKV
from pallas_kernels.prefill_attention import prefill_attention
from tests.kernel_cases.decode_attention import softmax
from tests.kernels import GPU_WAYS, TPU_WAYS, XLA, Case, normal


def oracle(
    inputs: dict[str, Any],
    *,
    tau: float = 1.0,
    scores: bool = True,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> dict[str, Any]:
    """The whole matrix at once."""
    q, k, v = inputs["q"], numbers(inputs["k"]), numbers(inputs["v"])
    (b, h, _, n, d), c = q.shape, k.shape[2]
    key = np.broadcast_to(inputs["key_position"], (b, h, c))[:, :, None, None]
    query = inputs["query_position"][:, None, None, :, None]
    visible = (key >= 0) & (key <= query) & (key > query - (window or 2**30))
    x = np.einsum("bhgnd,bhcd->bhgnc", q, k) * (scale or d**-0.5)
    if soft_cap:
        x = soft_cap * np.tanh(x / soft_cap)
    if "slopes" in inputs:
        at_query, at_key = query, key
        if "places" in inputs:
            at_query, at_key = inputs["places"][0][:, :, None, :, None], inputs["places"][1][:, :, None, None]
        x = x + inputs["slopes"][:, :, None, None] * (at_key - at_query)
    probs, lse = softmax(x, np.broadcast_to(visible, x.shape))
    found = {"out": np.einsum("bhgnc,bhce->bhgne", probs, v), "lse": lse}
    if scores:
        noise = inputs.get("noise", np.zeros((b, h, c)))[:, :, None, None]
        tempered, _ = softmax((x + noise) / tau, np.broadcast_to(visible, x.shape))
        weights = inputs.get("weights", np.ones((b, 1, n)))
        weights = weights[:, :, None] if weights.ndim == 3 else weights
        weights = np.broadcast_to(weights, (b, h, *weights.shape[2:]))
        found["scores"] = np.einsum("bhgnc,bhmn->bhmc", tempered, weights)
    return found


def numbers(x: Any) -> Any:
    """What an operand means."""
    if isinstance(x, SplitKV):
        return np.concatenate([numbers(x.old), numbers(x.new)], 2)
    if isinstance(x, LazyRope):
        keys, half = x.keys, x.cos.shape[1]
        cos, sin = x.cos[np.maximum(x.order, 0)], x.sin[np.maximum(x.order, 0)]
        first, second = keys[..., :half], keys[..., half : 2 * half]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, keys[..., 2 * half :]], -1)
    if isinstance(x, Quantised):
        codes = x.codes.astype(int)
        if x.codes.dtype == np.uint8:
            codes = np.concatenate([codes % 16, codes // 16], -1) - 8
        return codes * x.scale[..., None]
    return x


def operand(kind: str, x: Any) -> Any:
    """Keys or values like `x`, in another form."""
    rng, (b, h, c, d) = np.random.default_rng(0), x.shape
    order: Any  # NumPy, which the cases keep and a type checker would not let in
    scale: Any
    codes: Any
    if kind == "turned":
        order = np.broadcast_to(rng.permutation(c) - 1, (b, h, c)).astype(np.int32)
        angle = np.arange(c)[:, None] * 10000.0 ** -np.linspace(0, 1, d // 4)
        return LazyRope(x, order, np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32))
    scale = rng.random((b, h, c)).astype(np.float32) * (0.02 if kind == "int8" else 0.3)
    if kind == "int8":
        codes = rng.integers(-127, 128, (b, h, c, d), np.int8)
    else:
        codes = rng.integers(0, 256, (b, h, c, d // 2), np.uint8)
    return Quantised(codes, scale)


def run(
    inputs: dict[str, Any],
    *,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    arrays = dict(inputs)
    spec = AttentionSpec(scale or inputs["q"].shape[-1] ** -0.5, soft_cap, window, arrays.pop("slopes", None))
    found = prefill_attention(**arrays, spec=spec, **options)
    return {name: value for name, value in found._asdict().items() if value is not None}


def inputs(
    b: int,
    h: int,
    g: int,
    n: int,
    d: int,
    *,
    e: int | None = None,
    cached: int = 0,
    dtype: str = "float32",
    padding: bool = True,
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
        v=normal(rng, (b, h, c, e or d), dtype),
        query_position=query.astype(np.int32),
        key_position=key.astype(np.int32),
    )


SETTINGS = ("tau", "scores", "window", "scale", "soft_cap")
"""Of `run` and `oracle` alike."""


def case(
    label: str,
    *shape: int,
    extra: tuple[str, ...] = (),
    rows: int | None = None,
    kinds: tuple[str, str] | None = None,
    joined: bool = False,
    ways: tuple = (XLA, *TPU_WAYS),
    **options: Any,
) -> Case:
    """Random inputs; `extra` names optional arrays, `kinds` the forms of keys and values, or of the joined old ones."""
    settings = {name: options.pop(name) for name in SETTINGS if name in options}
    made = inputs(*shape, **options)
    b, h, g, n, _ = shape
    rng, c = np.random.default_rng(len(label)), made["k"].shape[2]
    if "noise" in extra:
        made["noise"] = rng.gumbel(size=(b, h, c)).astype(np.float32)
    if "weights" in extra:  # none of the first half, as in SnapKV, so that whole blocks count nothing
        weights = rng.random((b, h, n) if rows is None else (b, h, rows, n)) * (np.arange(n) >= n // 2)
        made["weights"] = weights.astype(np.float32)
    ways = (*ways, *GPU_WAYS) if shape[-1] >= 16 and XLA in ways and len(ways) > 1 else ways
    if "slopes" in extra:
        made["slopes"] = 2.0 ** -rng.integers(1, 8, size=(h, g)).astype(np.float32)
    if "places" in extra:
        made["places"] = tuple(rng.integers(0, 40, (b, h, x)).astype(np.int32) for x in (n, c))
    cached = c - n if joined else c
    for name, kind in zip("kv", kinds or ("array", "array"), strict=True):
        old = made[name][:, :, :cached]
        old = old if kind == "array" else operand(kind, old)
        made[name] = SplitKV(old, made[name][:, :, cached:]) if joined else old
    dtype = options.get("dtype", "float32")
    return Case(
        "prefill_attention",
        label,
        (made,),
        partial(run, **settings),
        partial(oracle, **settings),
        ways=ways,
        dtype=dtype,
    )


CASES = (
    case("plain", 2, 1, 2, 200, 16),
    case("one-token", 1, 1, 1, 1, 8),
    case("many-blocks", 1, 1, 1, 600, 8),
    case("no-scores", 1, 2, 2, 130, 16, scores=False),
    case("blocks-that-hide-nothing", 2, 1, 2, 1400, 8, cached=530, scores=False, ways=(XLA,)),
    case("alibi-over-blocks", 1, 1, 2, 800, 8, extra=("slopes", "noise"), tau=0.5, ways=(XLA,)),
    case("window-over-blocks", 1, 1, 2, 1700, 8, window=700, scores=False, ways=(XLA,)),
    case("noise", 2, 2, 2, 150, 16, extra=("noise", "weights")),
    case("cold", 1, 1, 2, 300, 8, extra=("noise",), tau=0.25),
    case("hot", 1, 1, 1, 140, 8, tau=2.0),
    case("window", 1, 1, 2, 300, 8, window=40, extra=("weights",)),
    case("after-a-cache", 2, 2, 2, 140, 8, cached=48, window=100),
    case("alibi", 2, 2, 3, 90, 16, cached=16, extra=("slopes",)),
    case("bfloat16", 2, 1, 4, 160, 64, dtype="bfloat16", extra=("noise",)),
    case("bfloat16-over-blocks", 1, 2, 4, 600, 64, dtype="bfloat16", cached=37, extra=("weights",), rows=2),
    case("bfloat16-at-a-temperature", 1, 1, 8, 140, 64, dtype="bfloat16", extra=("noise",), tau=2.0, window=90),
    case("one-key-for-all-heads-of-many", 1, 8, 1, 140, 8, extra=("weights",)),
    case("soft-cap-and-scale", 2, 2, 2, 140, 16, soft_cap=3.0, scale=0.4, extra=("noise",)),
    case("narrow-values", 1, 2, 2, 140, 32, e=16, extra=("weights",)),
    case("wide-values", 1, 1, 2, 70, 8, e=24, cached=20, scores=False),
    case("rows-of-weights", 2, 2, 2, 300, 16, extra=("weights",), rows=3),
    case("rows-of-weights-with-noise", 1, 2, 3, 150, 16, extra=("weights", "noise"), rows=8, tau=0.5),
    case("int8-cache", 2, 2, 2, 60, 16, cached=300, kinds=("int8", "int8"), joined=True, ways=(XLA,)),
    case("int4-cache", 1, 2, 2, 60, 16, e=8, cached=90, kinds=("int4", "int4"), joined=True, window=80, ways=(XLA,)),
    case("two-arrays", 1, 2, 2, 300, 8, cached=37, joined=True, window=20, extra=("noise", "weights"), ways=(XLA,)),
    case("turned", 2, 1, 2, 70, 16, cached=30, kinds=("turned", "int8"), extra=("weights",), rows=2, ways=(XLA,)),
    case("turned-cache", 1, 2, 1, 40, 16, cached=270, kinds=("turned", "array"), joined=True, ways=(XLA,)),
    case("alibi-at-places", 2, 2, 2, 90, 8, cached=10, extra=("slopes", "places"), ways=(XLA,)),
    case("places-without-alibi", 1, 2, 2, 90, 16, extra=("places",)),
)
