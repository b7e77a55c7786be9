"""Attention over pages: what `decode_attention` is for dense slots, where heads keep different numbers of tokens."""

from __future__ import annotations

import importlib
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels import common
from pallas_kernels.decode_attention.api import DTYPES
from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.pages import most_steps
from pallas_kernels.paged_attention.types import Paged

MOST_TOLD = 240_000
"""Numbers that fit in a TPU's scalar memory of a mebibyte."""


def paged_attention(
    q: Float[Array, "b h g d"],
    k: Float[Array, "P s d"],
    v: Float[Array, "P s d"],
    position: Int[Array, "P s"],
    owner: Int[Array, " P"],
    pages: Int[Array, "2"],
    query_position: Int[Array, " b"],
    *,
    window: int | None = None,
    slopes: Float[Array, "h g"] | None = None,
    logits: Float[Array, "P g s"] | None = None,
    implementation: str = "auto",
    interpret: Any = False,
    platform: str | None = None,
) -> Paged:
    """Softmax attention of one token per row over the pages of one layer in a pool, in one pass over them.

    Args:
        q: queries of one token per row; the g of a group share one KV head.
        k: keys of the whole pool, P pages of s slots.
        v: values of the whole pool.
        position: the token in each slot, -1 for none; slots after the query's position are not seen either.
        owner: whose a page is, row * h + head; within the layer a head's pages lie side by side, heads in order.
        pages: the layer's first page, and the one after its last; known only at run time.
        query_position: of each row's token; -1 for a row of padding, which sees nothing.
        window: the model's sliding window in tokens, or None.
        slopes: ALiBi's, of distances between positions, or None.
        logits: of another layer, which `xla` writes over instead of making its own; None if there are none.
        implementation: `auto`, `xla` or `pallas`. `xla` takes everything. `pallas` takes float32 and bfloat16 and g up
            to 16. On TPU it takes d a multiple of 8 up to 256, s up to 1024, and what its steps are told (three numbers
            for each head of each row, and one for each row and for each 512 slots of the pool) up to 240,000 numbers;
            on GPU d a power of two from 16 to 256, and less than 2^31 numbers in k. It compiles for both and has run
            in interpreters, never on a chip; `auto` is `pallas` on TPU where it can be, else `xla`.
        interpret: `True`, or on TPU `pltpu.InterpretParams()`, to run `pallas` without an accelerator.
        platform: for which the program is compiled; None for that of `jax.default_backend()`.

    Raises:
        Unsupported: the implementation asked for cannot run these arguments here.
        ValueError: there is no such implementation.
    """
    form = common.pallas_form(platform)
    limits = {"pallas": limit(q, k, v, form)}
    chosen = common.choose("paged_attention", implementation, limits, platform=platform, interpret=interpret)
    arguments: dict[str, Any] = dict(window=window, slopes=slopes)
    if chosen == "xla":
        return reference.paged_attention(q, k, v, position, owner, pages, query_position, logits=logits, **arguments)
    module = importlib.import_module(f"pallas_kernels.paged_attention.{'pallas_gpu' if form == 'gpu' else 'pallas'}")
    return module.paged_attention(q, k, v, position, owner, pages, query_position, interpret=interpret, **arguments)


def limit(q: Array, k: Array, v: Array, form: str) -> str | None:
    """What these arguments ask that the Pallas kernel cannot do, or None."""
    b, h, g, d = q.shape
    pages, size = k.shape[:2]
    same = k.dtype in DTYPES and q.dtype == k.dtype == v.dtype
    limits = [
        (same, f"q, k, v of {q.dtype}, {k.dtype}, {v.dtype} are not all float32 or all bfloat16"),
        (g <= 16, f"g={g} query heads share a KV head, more than 16"),
    ]
    if form == "tpu":
        told = most_steps(b * h, pages, size) + 3 * b * h + b
        return common.first_limit(
            *limits,
            (d <= 256 and d % 8 == 0, f"d={d} is not a multiple of 8 up to 256"),
            (size <= 1024, f"s={size} slots in a page are more than 1024"),
            (told <= MOST_TOLD, f"its steps are told {told} numbers of rows, heads and pages, more than {MOST_TOLD}"),
        )
    return common.first_limit(
        *limits,
        (16 <= d <= 256 and d & (d - 1) == 0, f"d={d} is not a power of two from 16 to 256"),
        (k.size < 2**31, f"the pool holds {k.size} numbers, more than 32 bits can count"),
    )
