"""Decode attention: one new token per row over the slots of a bounded cache."""

from __future__ import annotations

import importlib
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import common
from pallas_kernels.decode_attention import reference
from pallas_kernels.decode_attention.types import Decoded, Gumbel, LowRank

DTYPES = (jnp.dtype("float32"), jnp.dtype("bfloat16"))


def decode_attention(
    q: Float[Array, "b h g d"],
    k: Float[Array, "b h c d"],
    v: Float[Array, "b h c d"],
    position: Int[Array, "b h c"],
    query_position: Int[Array, " b"],
    *,
    window: int | None = None,
    slopes: Float[Array, "h g"] | None = None,
    low_rank: LowRank | None = None,
    scores: str | Gumbel | None = None,
    implementation: str = "auto",
    interpret: Any = False,
    platform: str | None = None,
) -> Decoded:
    """Softmax attention over slots in one pass over keys and values, with what policies ask to know of it.

    Args:
        q: queries of one token per row; the g of a group share one KV head.
        k: keys, in no order.
        v: values.
        position: the token in each slot, -1 for none; slots after the query's position are not seen either.
        query_position: of each row's token; -1 for a row of padding, which sees nothing.
        window: the model's sliding window in tokens, or None.
        slopes: ALiBi's, of distances between positions, or None.
        low_rank: the evicted tokens' share (LESS, equation 3), or None.
        scores: probabilities of `each` query head, their `sum` over the group, or a `Gumbel` (Keyformer, equation 9,
            summed over the group); None for none.
        implementation: `auto`, `xla`, `pallas` or `triton`. `xla` takes everything. The others take float32 and
            bfloat16, g up to 16, c up to 65536 and R up to 128. `pallas` takes d a multiple of 8 up to 256 on TPU; on
            GPU a power of two from 16 to 256, and less than 2^31 numbers in k. `triton` is for GPU, needs jax-triton,
            and takes any d up to 256, but no gaussian noise. All compile for their chips and have run in interpreters,
            none on a chip; `auto` is `pallas` on TPU where it can be, else `xla`.
        interpret: `True`, or `pltpu.InterpretParams()`, to run `pallas` without an accelerator.
        platform: for which the program is compiled; None for that of `jax.default_backend()`.

    Raises:
        Unsupported: the implementation asked for cannot run these arguments here.
        ValueError: `scores` or `implementation` is unknown.
    """
    noises = ("gumbel", "gaussian", "none")
    if isinstance(scores, Gumbel):
        if scores.noise not in noises:
            raise ValueError(f"noise={scores.noise!r} is not one of {', '.join(noises)}.")
    elif scores not in (None, "each", "sum"):
        raise ValueError(f"scores={scores!r} is not None, 'each', 'sum' or a Gumbel.")
    limits = {
        "pallas": limit(q, k, v, low_rank, common.pallas_form(platform)),
        "triton": triton_limit(q, k, v, low_rank, scores),
    }
    chosen = common.choose("decode_attention", implementation, limits, platform=platform, interpret=interpret)
    arguments: dict[str, Any] = dict(window=window, slopes=slopes, low_rank=low_rank, scores=scores)
    if chosen == "xla":
        return reference.decode_attention(q, k, v, position, query_position, **arguments)
    # Kernels are imported where one runs: Pallas takes long, jax-triton is not everywhere.
    if chosen == "pallas":
        chosen = "pallas_gpu" if common.pallas_form(platform) == "gpu" else "pallas"
        arguments["interpret"] = interpret
    form = importlib.import_module(f"pallas_kernels.decode_attention.{chosen}")
    return form.decode_attention(q, k, v, position, query_position, **arguments)


def limit(q: Array, k: Array, v: Array, low_rank: LowRank | None, form: str) -> str | None:
    """What these arguments ask that the Pallas kernel for `tpu` or `gpu` cannot do, or None."""
    d = q.shape[3]
    if form == "tpu":
        return common.first_limit(
            *_limits(q, k, v, low_rank), (d <= 256 and d % 8 == 0, f"d={d} is not a multiple of 8 up to 256")
        )
    return common.first_limit(
        *_limits(q, k, v, low_rank),
        (16 <= d <= 256 and d & (d - 1) == 0, f"d={d} is not a power of two from 16 to 256"),
        (k.size < 2**31, f"k holds {k.size} numbers, more than 32 bits can count"),
    )


def triton_limit(q: Array, k: Array, v: Array, low_rank: LowRank | None, scores: str | Gumbel | None) -> str | None:
    """What these arguments ask that the Triton kernel cannot do, or None."""
    gaussian = isinstance(scores, Gumbel) and scores.noise == "gaussian"
    return common.first_limit(
        *_limits(q, k, v, low_rank),
        (q.shape[3] <= 256, f"d={q.shape[3]} is more than 256"),
        (not gaussian, "it has no gaussian noise"),
    )


def _limits(q: Array, k: Array, v: Array, low_rank: LowRank | None) -> list[tuple[bool, str]]:
    g, c = q.shape[2], k.shape[2]
    same = k.dtype in DTYPES and q.dtype == k.dtype == v.dtype
    features = 1 if low_rank is None else low_rank.features.shape[-1]
    return [
        (same, f"q, k, v of {q.dtype}, {k.dtype}, {v.dtype} are not all float32 or all bfloat16"),
        (g <= 16, f"g={g} query heads share a KV head, more than 16"),
        (c <= 65536, f"c={c} slots are more than 65536"),
        (features <= 128, f"R={features} features are more than 128"),
    ]
