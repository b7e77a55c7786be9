"""Attention over pages: cases, and the operation head by head."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import paged_attention
from tests.kernel_cases.decode_attention import softmax
from tests.kernels import GPU_WAYS, TPU_WAYS, XLA, Case, normal


def oracle(inputs: dict[str, Any], *, window: int | None) -> dict[str, Any]:
    """Every head gathers its slots and attends."""
    q, owner, (first, last) = inputs["q"], inputs["owner"], inputs["pages"]
    b, h, g, d = q.shape
    out, lse = np.zeros(q.shape), np.full((b, h, g), -np.inf)
    weights = np.zeros((len(owner), g, inputs["k"].shape[1]))
    for row, head in np.ndindex(b, h):
        mine = [page for page in range(first, last) if owner[page] == row * h + head]
        if not mine:
            continue
        k, v, position = (inputs[name][mine] for name in ("k", "v", "position"))
        at, query = position.reshape(-1), inputs["query_position"][row]
        visible = (at >= 0) & (at <= query)
        if window is not None:
            visible &= at > query - window
        logits = q[row, head] @ k.reshape(-1, d).T / math.sqrt(d)
        if "slopes" in inputs:
            logits = logits + inputs["slopes"][head][:, None] * (at - query)
        probs, lse[row, head] = softmax(logits, np.broadcast_to(visible, logits.shape))
        out[row, head] = probs @ v.reshape(-1, d)
        weights[mine] = np.moveaxis(probs.reshape(g, len(mine), -1), 0, 1)
    return {"out": out, "lse": lse, "probs": weights}


def run(inputs: dict[str, Any], **options: Any) -> dict[str, Any]:
    """With the logits made into probabilities, as policies want them, of the layer's own pages."""
    size = inputs["position"].shape[1]
    used = jnp.full((len(inputs["owner"]), inputs["q"].shape[2], size), jnp.nan)
    found = paged_attention(**inputs, logits=used, **options)
    owner, pages = inputs["owner"], inputs["pages"]
    total = jnp.where(jnp.isfinite(found.lse), found.lse, 0.0).reshape(-1, found.lse.shape[-1])[owner]
    mine = (jnp.arange(len(owner)) >= pages[0]) & (jnp.arange(len(owner)) < pages[1])
    probs = jnp.where(mine[:, None, None], jnp.exp(found.logits - total[..., None]), 0.0)
    return {"out": found.out, "lse": found.lse, "probs": probs}


def case(
    b: int, h: int, g: int, size: int, d: int, *, dtype: str = "float32", most: int = 6, window=None, alibi=False
) -> Case:
    """A layer in the middle of a pool, with heads of 0 to `most` pages and empty slots anywhere."""
    rng = np.random.default_rng(b + h + g + size + d)
    counts = rng.integers(0, most + 1, size=b * h)
    counts[-1] = most
    before, after = 3, 2
    owner = np.concatenate([np.full(before, 1), np.repeat(np.arange(b * h), counts), np.zeros(after)]).astype(np.int32)
    total = len(owner)
    inputs: dict[str, Any] = {
        "q": normal(rng, (b, h, g, d), dtype),
        "k": normal(rng, (total, size, d), dtype),
        "v": normal(rng, (total, size, d), dtype),
        "position": rng.integers(-1, 2 * most * size, size=(total, size)).astype(np.int32),
        "owner": owner,
        "pages": np.asarray([before, total - after], np.int32),
        "query_position": rng.integers(most * size, 2 * most * size, size=b).astype(np.int32),
    }
    if b > 1:
        inputs["query_position"][0] = -1
    if alibi:
        inputs["slopes"] = (2.0 ** -np.arange(1, h * g + 1)).reshape(h, g).astype(np.float32)
    return Case(
        "paged_attention",
        f"{b}x{h}x{g}x{size}x{d}" + ("-alibi" if alibi else "") + ("-window" if window else ""),
        (inputs,),
        lambda inputs, **options: run(inputs, window=window, **options),
        lambda inputs: oracle(inputs, window=window),
        ways=(XLA, *TPU_WAYS, *(GPU_WAYS if d & (d - 1) == 0 else ())),
        dtype=dtype,
    )


CASES = (
    case(2, 2, 2, 16, 64),
    case(1, 4, 1, 16, 128, dtype="bfloat16", window=60),
    case(2, 3, 4, 32, 64, dtype="bfloat16", alibi=True),
    case(1, 2, 3, 16, 80),
    case(1, 1, 2, 16, 64, most=100),
    case(2, 4, 9, 32, 128, dtype="bfloat16", most=70),
    case(2, 2, 16, 64, 256, most=20, alibi=True, window=700),
)
