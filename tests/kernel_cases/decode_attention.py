"""Decode attention: cases, and the operation in float64 NumPy."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from scipy.special import erfinv

from pallas_kernels.attention import AttentionSpec
from pallas_kernels.decode_attention import LowRank, ScoreNoise, Sinks, decode_attention
from pallas_kernels.operands import Quantised
from tests.kernels import GPU_WAYS, TPU_WAYS, XLA, Case, normal

LAYER = 3
"""Of the noise."""


def mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def noise(kind: str, seed: np.ndarray, position: np.ndarray, first: np.ndarray) -> np.ndarray:
    """zeta [b h c] of heads from the first one of each row [b]."""
    if kind == "none":
        return np.zeros(position.shape)
    heads = (first[:, None] + np.arange(position.shape[1])).astype(np.uint32)[..., None]
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


def quantised(x: np.ndarray, bits: int) -> Quantised:
    """Symmetric codes of each slot, in float32: halves are rounded by what a division of that precision says."""
    most = np.float32(2 ** (bits - 1) - 1)
    x = x.astype(np.float32)
    scale = np.abs(x).max(-1, keepdims=True) / most
    codes = np.round(x / scale).astype(np.int8)
    if bits == 4:
        low, high = np.split((codes + 8).astype(np.uint8), 2, axis=-1)
        codes = low | (high << 4)
    return Quantised(codes, scale[..., 0].astype(np.float32))  # type: ignore[arg-type]


def decoded(x: Any) -> np.ndarray:
    """What codes mean, in float64."""
    if not isinstance(x, Quantised):
        return x
    codes = np.asarray(x.codes)
    if codes.dtype == np.uint8:
        codes = np.concatenate([codes & 15, codes >> 4], axis=-1).astype(np.int8) - 8
    return codes * np.asarray(x.scale, np.float64)[..., None]


def capped(logits: np.ndarray, soft_cap: float | None) -> np.ndarray:
    """Bounded as in Gemma 2."""
    return logits if soft_cap is None else soft_cap * np.tanh(logits / soft_cap)


def oracle(
    inputs: dict[str, Any], *, scale: float, soft_cap: float | None, window: int | None, scores: str | None
) -> dict[str, Any]:
    """Equation 3 of LESS and equation 9 of Keyformer as they are printed, in float64."""
    q, k, v = (decoded(inputs[name]) for name in "qkv")
    position, query = inputs["position"][:, :, None, :], inputs["query_position"][:, None, None, None]
    visible = (position >= 0) & (position <= query)
    if window is not None:
        visible &= position > query - window
    products = np.einsum("bhgd,bhcd->bhgc", q, k)
    if "sinks" in inputs:
        near = (np.arange(k.shape[2]) < inputs["sinks"].count) & (position < inputs["sinks"].count)
        products = np.where(near, np.einsum("bhgd,bhcd->bhgc", inputs["sinks"].q.astype(np.float64), k), products)
        if inputs["sinks"].gap is not None:
            moved = inputs["position"] + np.where(near[:, :, 0], inputs["sinks"].gap[:, None, None], 0)
            inputs = inputs | {"places": (inputs["query_position"][:, None], moved)}
    logits = capped(products * scale, soft_cap)
    if "slopes" in inputs:
        seen_at, place = inputs.get("places", (inputs["query_position"][:, None], inputs["position"]))
        logits = logits + inputs["slopes"][:, :, None] * (place[:, :, None] - seen_at[:, :, None, None])
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
        first = inputs.get("first", np.zeros_like(inputs["query_position"]))
        zeta = noise(scores, inputs["seed"], inputs["position"], first)
        tempered = (logits + zeta[:, :, None]) / inputs["tau"][:, None, None, None]
        found["scores"] = softmax(tempered, visible)[0].sum(2)
    return found


def arguments(some: Case) -> dict[str, Any]:
    """What `decode_attention` is called with for a plain case, without scores."""
    inputs = dict(some.arrays[0])
    slopes = inputs.pop("slopes", None)
    return inputs | {"spec": AttentionSpec(inputs["q"].shape[-1] ** -0.5, slopes=slopes)}


def run(
    inputs: dict[str, Any], *, scale: float, soft_cap: float | None, window: int | None, scores: Any, **options: Any
) -> dict[str, Any]:
    inputs = dict(inputs)
    spec = AttentionSpec(scale, soft_cap, window, inputs.pop("slopes", None))
    low_rank = LowRank(*inputs.pop("low_rank")) if "low_rank" in inputs else None
    if "seed" in inputs:
        scores = ScoreNoise(inputs.pop("seed"), inputs.pop("tau"), LAYER, scores, inputs.pop("first", None))
    found = decode_attention(**inputs, spec=spec, low_rank=low_rank, scores=scores, **options)
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
    e: int | None = None,
    bits: tuple[int, int] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    moved: bool = False,
    sinks: int = 0,
    first: int = 0,
    label: str = "",
) -> Case:
    """Random inputs.

    `scores` may name a noise, which asks for Keyformer's increments; `bits` are those of keys and values, 0 for none;
    `moved` tokens are not where their positions say.
    """
    e, bits = d if e is None else e, bits or (0, 0)
    rng = np.random.default_rng(b * 1000 + h * 100 + g * 10 + c + d)
    position, query = slots(rng, b, h, c, live)
    inputs: dict[str, Any] = {name: normal(rng, (b, h, c, width), dtype) for name, width in (("k", d), ("v", e))}
    inputs |= {"q": normal(rng, (b, h, g, d), dtype), "position": position, "query_position": query}
    inputs["k"] *= ml_dtypes.bfloat16(2) if dtype == "bfloat16" else np.float32(2)  # peaks, not a plain mean
    inputs |= {name: quantised(inputs[name], some) for name, some in zip("kv", bits, strict=True) if some}
    if alibi:
        inputs["slopes"] = (2.0 ** -np.arange(1, h * g + 1)).reshape(h, g).astype(np.float32)
    if moved:
        inputs["places"] = (rng.integers(0, c, (b, h)).astype(np.int32), rng.integers(0, c, (b, h, c)).astype(np.int32))
    if sinks:
        position[..., :sinks][position[..., :sinks] >= 0] %= sinks
        gap = rng.integers(0, c, b).astype(np.int32) if alibi else None
        inputs["sinks"] = Sinks(normal(rng, (b, h, g, d), dtype), sinks, gap)  # type: ignore[arg-type]
    if features:
        parts = [(b, h, g, features), (b, h, features, e), (b, h, features)]
        inputs["low_rank"] = tuple(normal(rng, shape, "float32") for shape in parts)
        phi, memory, z = inputs["low_rank"]
        z = np.abs(z)
        z[0, 0] = memory[0, 0] = 0  # nothing has left this head yet
        inputs["low_rank"] = (np.abs(phi), memory, z)
    if scores not in (None, "each", "sum"):
        inputs["seed"] = rng.integers(2**32, size=b, dtype=np.uint32)
        inputs["tau"] = rng.uniform(1, 2, size=b).astype(np.float32)
        if first:
            inputs["first"] = np.full(b, first, np.int32)
    settings: dict[str, Any] = dict(
        scale=1 / math.sqrt(d) if scale is None else scale, soft_cap=soft_cap, window=window, scores=scores
    )
    extra = {f"R{features}": features, f"e{e}": e != d, f"bits{bits[0]},{bits[1]}": any(bits), "cap": soft_cap}
    extra |= {
        "scale": scale,
        "alibi": alibi,
        "moved": moved,
        "window": window,
        f"sinks{sinks}": sinks,
        f"first{first}": first,
    }
    named = [name for name, wanted in extra.items() if wanted]
    kernels = TPU_WAYS if 4 not in bits or (d % 16 == 0 and e % 16 == 0) else ()
    least = 32 if 4 in bits else 16
    plain = not (sinks and scores)
    kernels += GPU_WAYS if plain and all(width >= least and width & (width - 1) == 0 for width in (d, e)) else ()
    return Case(
        "decode_attention",
        "-".join(filter(None, [f"{b}x{h}x{g}x{c}x{d}", live, scores, label, *named])),
        (inputs,),
        lambda inputs, **options: run(inputs, **settings, **options),
        lambda inputs: oracle(inputs, **settings),
        ways=(XLA, *(() if moved else kernels)),
        dtype=dtype,
        rounded=any(bits),
    )


CASES = (
    case(2, 2, 2, 48, 64, scores="each"),
    case(2, 8, 1, 200, 64, live="ragged", sinks=4, alibi=True),
    case(2, 8, 1, 200, 64, scores="sum", features=8),
    case(1, 2, 4, 64, 128, scores="gumbel", dtype="bfloat16", features=8),
    case(1, 1, 16, 130, 256, scores="gaussian", dtype="bfloat16", window=100, first=3),
    case(1, 3, 3, 33, 80, scores="none", alibi=True, features=5),
    case(1, 2, 2, 16, 64, live="one", scores="gumbel", first=6),
    case(2, 2, 2, 16, 64, live="none", scores="each"),
    case(1, 2, 1, 16, 64, live="none", scores="gumbel", features=4),
    case(1, 2, 2, 64, 64, live="full", dtype="bfloat16"),
    case(2, 2, 2, 40, 64, scores="sum", soft_cap=2.0, scale=0.3, alibi=True),
    case(1, 2, 3, 130, 128, e=64, scores="gumbel", features=3, soft_cap=5.0, window=60),
    case(2, 2, 2, 33, 64, e=80, dtype="bfloat16", scores="each"),
    case(2, 3, 2, 40, 64, alibi=True, moved=True, window=30, scores="sum"),
    case(1, 2, 1, 40, 64, alibi=True, scores="sum"),
    case(2, 2, 3, 200, 64, bits=(8, 8), scores="gumbel", features=4),
    case(1, 2, 2, 512, 128, bits=(8, 8), scores="each", dtype="bfloat16", soft_cap=5.0),
    case(2, 2, 2, 128, 64, bits=(4, 4), scores="sum", alibi=True),
    case(1, 2, 1, 150, 128, e=64, bits=(8, 4), scores="gaussian", dtype="bfloat16"),
    case(1, 2, 2, 48, 64, bits=(0, 8), window=20, scores="each"),
    case(1, 2, 2, 512, 64, bits=(4, 0), scores="sum"),
    case(2, 2, 2, 16, 64, bits=(8, 8), live="none", scores="each"),
    case(1, 2, 2, 320, 64, bits=(8, 8), moved=True, alibi=True),
    case(2, 2, 3, 40, 64, sinks=4, dtype="bfloat16", features=3, soft_cap=4.0),
    case(2, 8, 1, 150, 128, sinks=20, scores="each", window=100),
    case(1, 2, 2, 512, 64, sinks=4, bits=(8, 8), live="full"),
    case(1, 2, 1, 16, 32, sinks=20, bits=(4, 4), alibi=True),
    case(2, 16, 1, 384, 128, scores="gumbel", dtype="bfloat16", alibi=True, first=2),
    case(2, 16, 1, 40, 64, bits=(8, 4), scores="each", features=3),
    case(2, 2, 35, 130, 64, live="ragged"),
    case(1, 2, 64, 512, 128, dtype="bfloat16", bits=(8, 8), soft_cap=5.0),
)
