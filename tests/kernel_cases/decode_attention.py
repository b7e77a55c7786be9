"""Decode attention: cases, and the operation in float64 NumPy."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from scipy.special import erfinv

from pallas_kernels.decode_attention import Gumbel, LowRank, decode_attention
from tests.kernels import GPU_WAYS, TPU_WAYS, XLA, Case, normal

LAYER = 3
"""Of the noise."""


def mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def noise(kind: str, seed: np.ndarray, position: np.ndarray) -> np.ndarray:
    """zeta [b h c]."""
    if kind == "none":
        return np.zeros(position.shape)
    heads = np.arange(position.shape[1], dtype=np.uint32)[:, None]
    bits = mix(seed[:, None, None] ^ np.uint32(LAYER * 0x9E3779B9 % 2**32))
    bits = mix(bits ^ (heads * np.uint32(0x7FEB352D) + np.uint32(1)))
    bits = mix(bits ^ (position.astype(np.uint32) * np.uint32(0x846CA68B) + np.uint32(1)))
    uniform = ((bits >> np.uint32(9)) + 0.5) / 2**23
    if kind == "gaussian":
        return np.euler_gamma + math.pi / math.sqrt(6) * math.sqrt(2) * erfinv(2 * uniform - 1)
    return -np.log(-np.log(uniform))


def softmax(logits: np.ndarray, visible: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities over the last axis and the log-sum-exp; 0 and -inf where nothing is visible."""
    highest = np.max(logits, axis=-1, keepdims=True, initial=-1e30, where=visible)
    weights = np.where(visible, np.exp(np.where(visible, logits - highest, 0)), 0)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, highest + np.log(total), -np.inf)
    return weights / np.where(total > 0, total, 1), lse[..., 0]


def oracle(inputs: dict[str, Any], *, window: int | None, scores: str | None) -> dict[str, Any]:
    """Equation 3 of LESS and equation 9 of Keyformer as they are printed, in float64."""
    q, k, v = (inputs[name] for name in "qkv")
    position, query = inputs["position"][:, :, None, :], inputs["query_position"][:, None, None, None]
    visible = (position >= 0) & (position <= query)
    if window is not None:
        visible &= position > query - window
    logits = np.einsum("bhgd,bhcd->bhgc", q, k) / math.sqrt(q.shape[-1])
    if "slopes" in inputs:
        logits = logits + inputs["slopes"][:, :, None] * (position - query)
    visible = np.broadcast_to(visible, logits.shape)
    probs, lse = softmax(logits, visible)
    out = np.einsum("bhgc,bhcd->bhgd", probs, v)
    if "low_rank" in inputs:
        phi, h, z = inputs["low_rank"]
        total = np.exp(lse) + np.einsum("bhgr,bhr->bhg", phi, z)
        out = np.exp(lse)[..., None] * out + np.einsum("bhgr,bhrd->bhgd", phi, h)
        out = out / np.where(total > 0, total, 1)[..., None]
        with np.errstate(divide="ignore"):
            lse = np.log(total)
    found = {"out": out, "lse": lse}
    if scores in ("each", "sum"):
        found["scores"] = probs if scores == "each" else probs.sum(2)
    elif scores is not None:
        zeta = noise(scores, inputs["seed"], inputs["position"])
        tempered = (logits + zeta[:, :, None]) / inputs["tau"][:, None, None, None]
        found["scores"] = softmax(tempered, visible)[0].sum(2)
    return found


def run(inputs: dict[str, Any], *, window: int | None, scores: Any, **options: Any) -> dict[str, Any]:
    inputs = dict(inputs)
    low_rank = LowRank(*inputs.pop("low_rank")) if "low_rank" in inputs else None
    if "seed" in inputs:
        scores = Gumbel(inputs.pop("seed"), inputs.pop("tau"), LAYER, scores)
    found = decode_attention(**inputs, window=window, low_rank=low_rank, scores=scores, **options)
    return {name: value for name, value in found._asdict().items() if value is not None}


def slots(rng: np.random.Generator, b: int, h: int, c: int, live: str) -> tuple[np.ndarray, np.ndarray]:
    """Positions in no order, and the queries': `ragged` with empty slots, `one` or `none` live, `full`."""
    query = rng.integers(c, 3 * c, size=b).astype(np.int32)
    position = np.stack([[rng.permutation(end + 1)[:c] for _ in range(h)] for end in query]).astype(np.int32)
    if live == "none":
        position[:] = -1
    elif live == "one":
        position[rng.permuted(np.broadcast_to(np.arange(c), position.shape), axis=-1) > 0] = -1
    elif live == "ragged":
        position[np.arange(c) >= rng.integers(0, c + 1, size=(b, h, 1))] = -1
        position[rng.random(position.shape) < 0.2] = -1
        if b > 1:
            query[-1] = -1  # a row of padding
    return position, query


def case(
    b: int,
    h: int,
    g: int,
    c: int,
    d: int,
    *,
    dtype: str = "float32",
    live: str = "ragged",
    scores: str | None = None,
    window: int | None = None,
    alibi: bool = False,
    features: int = 0,
    label: str = "",
) -> Case:
    """Random inputs; `scores` may name a noise, which asks for Keyformer's increments."""
    rng = np.random.default_rng(b * 1000 + h * 100 + g * 10 + c + d)
    position, query = slots(rng, b, h, c, live)
    inputs: dict[str, Any] = {name: normal(rng, (b, h, c, d), dtype) for name in "kv"}
    inputs |= {"q": normal(rng, (b, h, g, d), dtype), "position": position, "query_position": query}
    inputs["k"] *= ml_dtypes.bfloat16(2) if dtype == "bfloat16" else np.float32(2)  # peaks, not a plain mean
    if alibi:
        inputs["slopes"] = (2.0 ** -np.arange(1, h * g + 1)).reshape(h, g).astype(np.float32)
    if features:
        parts = [(b, h, g, features), (b, h, features, d), (b, h, features)]
        inputs["low_rank"] = tuple(normal(rng, shape, "float32") for shape in parts)
        phi, memory, z = inputs["low_rank"]
        z = np.abs(z)
        z[0, 0] = memory[0, 0] = 0  # nothing has left this head yet
        inputs["low_rank"] = (np.abs(phi), memory, z)
    if scores not in (None, "each", "sum"):
        inputs["seed"] = rng.integers(2**32, size=b, dtype=np.uint32)
        inputs["tau"] = rng.uniform(1, 2, size=b).astype(np.float32)
    label = "-".join(filter(None, [f"{b}x{h}x{g}x{c}x{d}", live, scores, label, f"R{features}" if features else ""]))
    return Case(
        "decode_attention",
        label + ("-alibi" if alibi else "") + ("-window" if window else ""),
        (inputs,),
        lambda inputs, **options: run(inputs, window=window, scores=scores, **options),
        lambda inputs: oracle(inputs, window=window, scores=scores),
        ways=(XLA, *TPU_WAYS, *(GPU_WAYS if d & (d - 1) == 0 else ())),
        dtype=dtype,
    )


CASES = (
    case(2, 2, 2, 48, 64, scores="each"),
    case(2, 8, 1, 200, 64, scores="sum", features=8),
    case(1, 2, 4, 64, 128, scores="gumbel", dtype="bfloat16", features=8),
    case(1, 1, 16, 130, 256, scores="gaussian", dtype="bfloat16", window=100),
    case(1, 3, 3, 33, 80, scores="none", alibi=True, features=5),
    case(1, 2, 2, 16, 64, live="one", scores="gumbel"),
    case(2, 2, 2, 16, 64, live="none", scores="each"),
    case(1, 2, 1, 16, 64, live="none", scores="gumbel", features=4),
    case(1, 2, 2, 64, 64, live="full", dtype="bfloat16"),
)
