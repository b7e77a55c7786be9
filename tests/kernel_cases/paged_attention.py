"""Attention over pages: cases, and the operation head by head."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import AttentionSpec
from pallas_kernels.paged_attention import paged_attention
from tests.kernel_cases.decode_attention import capped, decoded, quantised, softmax
from tests.kernels import GPU_WAYS, TPU_WAYS, XLA, Case, normal


def oracle(inputs: dict[str, Any], *, scale: float, soft_cap: float | None, window: int | None) -> dict[str, Any]:
    """Every head gathers its slots and attends."""
    q, owner, (first, last) = inputs["q"], inputs["owner"], inputs["pages"]
    keys, values = decoded(inputs["k"]), decoded(inputs["v"])
    (b, h, g, d), e = q.shape, values.shape[-1]
    seen_at, place = inputs.get("places", (np.repeat(inputs["query_position"][:, None], h, 1), inputs["position"]))
    out, lse = np.zeros((b, h, g, e)), np.full((b, h, g), -np.inf)
    weights = np.zeros((len(owner), g, keys.shape[1]))
    for row, head in np.ndindex(b, h):
        mine = [page for page in range(first, last) if owner[page] == row * h + head]
        if not mine:
            continue
        k, v, position = keys[mine], values[mine], inputs["position"][mine]
        at, query = position.reshape(-1), inputs["query_position"][row]
        visible = (at >= 0) & (at <= query)
        if window is not None:
            visible &= at > query - window
        logits = capped(q[row, head] @ k.reshape(-1, d).T * scale, soft_cap)
        if "slopes" in inputs:
            logits = logits + inputs["slopes"][head][:, None] * (place[mine].reshape(-1) - seen_at[row, head])
        probs, lse[row, head] = softmax(logits, np.broadcast_to(visible, logits.shape))
        out[row, head] = probs @ v.reshape(-1, e)
        weights[mine] = np.moveaxis(probs.reshape(g, len(mine), -1), 0, 1)
    return {"out": out, "lse": lse, "probs": weights}


def run(
    inputs: dict[str, Any], *, scale: float, soft_cap: float | None, window: int | None, **options: Any
) -> dict[str, Any]:
    """With the logits made into probabilities, as policies want them, of the layer's own pages."""
    inputs = dict(inputs)
    spec = AttentionSpec(scale, soft_cap, window, inputs.pop("slopes", None))
    size = inputs["position"].shape[1]
    used = jnp.full((len(inputs["owner"]), inputs["q"].shape[2], size), jnp.nan)
    found = paged_attention(**inputs, spec=spec, logits=used, **options)
    owner, pages = inputs["owner"], inputs["pages"]
    total = jnp.where(jnp.isfinite(found.lse), found.lse, 0.0).reshape(-1, found.lse.shape[-1])[owner]
    mine = (jnp.arange(len(owner)) >= pages[0]) & (jnp.arange(len(owner)) < pages[1])
    probs = jnp.where(mine[:, None, None], jnp.exp(found.logits[: len(owner)] - total[..., None]), 0.0)
    return {"out": found.out, "lse": found.lse, "probs": probs}


def case(
    b: int,
    h: int,
    g: int,
    size: int,
    d: int,
    *,
    dtype: str = "float32",
    most: int = 6,
    window: int | None = None,
    alibi: bool = False,
    e: int | None = None,
    bits: tuple[int, int] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    moved: bool = False,
) -> Case:
    """A layer in the middle of a pool, with heads of 0 to `most` pages and empty slots anywhere.

    `bits` are those of keys and values, 0 for none; `moved` tokens are not where their positions say.
    """
    e, bits = d if e is None else e, bits or (0, 0)
    rng = np.random.default_rng(b + h + g + size + d)
    counts = rng.integers(0, most + 1, size=b * h)
    counts[-1] = most
    before, after = 3, 2
    owner = np.concatenate([np.full(before, 1), np.repeat(np.arange(b * h), counts), np.zeros(after)]).astype(np.int32)
    total = len(owner)
    inputs: dict[str, Any] = {
        "q": normal(rng, (b, h, g, d), dtype),
        "k": normal(rng, (total, size, d), dtype),
        "v": normal(rng, (total, size, e), dtype),
        "position": rng.integers(-1, 2 * most * size, size=(total, size)).astype(np.int32),
        "owner": owner,
        "pages": np.asarray([before, total - after], np.int32),
        "query_position": rng.integers(most * size, 2 * most * size, size=b).astype(np.int32),
    }
    inputs |= {name: quantised(inputs[name], some) for name, some in zip("kv", bits, strict=True) if some}
    if b > 1:
        inputs["query_position"][0] = -1
    if alibi:
        inputs["slopes"] = (2.0 ** -np.arange(1, h * g + 1)).reshape(h, g).astype(np.float32)
    if moved:
        shapes = (b, h), (total, size)
        inputs["places"] = tuple(rng.integers(0, most * size, shape).astype(np.int32) for shape in shapes)
    settings: dict[str, Any] = dict(
        scale=1 / math.sqrt(d) if scale is None else scale, soft_cap=soft_cap, window=window
    )
    extra = {f"e{e}": e != d, f"bits{bits[0]},{bits[1]}": any(bits), "cap": soft_cap, "scale": scale}
    extra |= {"alibi": alibi, "moved": moved, "window": window}
    fits = all(width == 256 for width, some in zip((d, e), bits, strict=True) if some == 4)
    least = 32 if 4 in bits else 16
    kernels = TPU_WAYS if fits else ()
    kernels += GPU_WAYS if all(width >= least and width & (width - 1) == 0 for width in (d, e)) else ()
    return Case(
        "paged_attention",
        "-".join([f"{b}x{h}x{g}x{size}x{d}", *(name for name, wanted in extra.items() if wanted)]),
        (inputs,),
        lambda inputs, **options: run(inputs, **settings, **options),
        lambda inputs: oracle(inputs, **settings),
        ways=(XLA, *(() if moved else kernels)),
        dtype=dtype,
        rounded=any(bits),
    )


CASES = (
    case(2, 2, 2, 16, 64),
    case(1, 4, 1, 16, 128, dtype="bfloat16", window=60),
    case(2, 3, 4, 32, 64, dtype="bfloat16", alibi=True),
    case(1, 2, 3, 16, 80),
    case(1, 1, 2, 16, 64, most=100),
    case(2, 4, 9, 32, 128, dtype="bfloat16", most=70),
    case(2, 2, 16, 64, 256, most=20, alibi=True, window=700),
    case(2, 2, 2, 16, 64, e=128, soft_cap=2.0, scale=0.3, alibi=True),
    case(1, 3, 2, 16, 64, alibi=True, moved=True, window=40),
    case(2, 2, 2, 16, 64, bits=(8, 8), alibi=True),
    case(1, 4, 4, 32, 128, e=64, bits=(8, 8), dtype="bfloat16", most=20, soft_cap=5.0),
    case(1, 2, 2, 16, 256, bits=(4, 4)),
    case(2, 2, 1, 16, 64, bits=(4, 8), most=70),
    case(1, 2, 2, 16, 64, bits=(0, 8), window=40),
)
