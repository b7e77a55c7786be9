"""Attention over pages: what `decode_attention` is for dense slots, where heads keep different numbers of tokens."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels import common
from pallas_kernels.decode_attention.api import DTYPES
from pallas_kernels.paged_attention import pallas, reference
from pallas_kernels.paged_attention.types import Paged


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
        implementation: `auto`, `xla` or `pallas`. `xla` takes everything. `pallas` is for GPU, where it takes what
            `decode_attention` takes; it compiles and has run in the interpreter, never on a chip. There is no form for
            TPU: what a pool knows of a slot lies in rows of s numbers, and a TPU's registers want 128.
        interpret: `True` to run `pallas` without an accelerator.
        platform: for which the program is compiled; None for that of `jax.default_backend()`.

    Raises:
        Unsupported: the implementation asked for cannot run these arguments here.
        ValueError: there is no such implementation.
    """
    limits = {"pallas": limit(q, k, v, common.pallas_form(platform))}
    chosen = common.choose("paged_attention", implementation, limits, platform=platform, interpret=interpret)
    arguments: dict[str, Any] = dict(window=window, slopes=slopes)
    if chosen == "xla":
        return reference.paged_attention(q, k, v, position, owner, pages, query_position, logits=logits, **arguments)
    return pallas.paged_attention(q, k, v, position, owner, pages, query_position, interpret=interpret, **arguments)


def limit(q: Array, k: Array, v: Array, form: str) -> str | None:
    """What these arguments ask that the Pallas kernel cannot do, or None."""
    g, d = q.shape[2:]
    same = k.dtype in DTYPES and q.dtype == k.dtype == v.dtype
    return common.first_limit(
        (form == "gpu", "it is written for gpu alone"),
        (same, f"q, k, v of {q.dtype}, {k.dtype}, {v.dtype} are not all float32 or all bfloat16"),
        (g <= 16, f"g={g} query heads share a KV head, more than 16"),
        (16 <= d <= 256 and d & (d - 1) == 0, f"d={d} is not a power of two from 16 to 256"),
        (k.size < 2**31, f"the pool holds {k.size} numbers, more than 32 bits can count"),
    )
