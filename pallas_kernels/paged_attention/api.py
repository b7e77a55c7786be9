"""Attention over pages: the counterpart of `decode_attention` for heads that keep different numbers of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import AttentionSpec, Partial, static
from pallas_kernels.common import LANES
from pallas_kernels.decode_attention.api import operand_limits, operand_settings, refuse_lazy_rope, width_limits
from pallas_kernels.op import Limit, Op, operation
from pallas_kernels.operands import Operand, Quantised

Places = tuple[Int[Array, "b h"], Int[Array, "P s"]]
"""Model positions of the query and the keys, if they are not their positions in the text."""


class PagedResult(NamedTuple):
    """Attention of one token per row over its heads' pages."""

    out: Float[Array, "b h g e"]
    """Attention, at least float32; zeros for a head that attends to nothing."""
    lse: Float[Array, "b h g"]
    """Logarithm of the sum of exponentials."""
    logits: Float[Array, "P_or_more g s"]
    """Logits of the visited pages, the lowest number in masked slots. Other pages, and any after the pool's, are
    arbitrary."""

    @property
    def partial(self) -> Partial:
        """The attention as `merge` takes it, with an axis of tokens."""
        return Partial(self.out[:, :, :, None], self.lse[..., None])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PagedAttention(Op[PagedResult]):
    """Compute softmax attention of one token per row over the pages of one layer in a pool, in one pass over them.

    Args:
        q: queries of one token per row; the g queries of a group share one KV head.
        k: keys of the whole pool, P pages of s slots [P s d], as in `decode_attention`.
        v: values of the whole pool [P s e], of any width.
        position: position of the token in each slot, -1 if empty; slots after the query's position are masked, too.
        owner: owner of each page, row * h + head; within the layer a head's pages are adjacent, heads in order.
        pages: the layer's first page, and the one after its last; known only at run time.
        query_position: position of each row's token; -1 for a row of padding, which attends to nothing.
        spec: the layer's scale, soft cap, window and slopes.
        places: model positions of the query [b h] and the keys [P s], if they are not `position`; only slopes use
            them, and the limits of kernels exclude places that matter.
        logits: logits of another layer, which `xla` overwrites instead of allocating an array; None if there are none.
        layers: number of layers in the pool; on TPU a step takes about as many pages as a head has in one, on average.
        how: see `pallas_kernels.op.How`. `xla` takes everything. `pallas` takes queries, keys, values, widths and g as
            `decode_attention` does. On TPU, four bits need d and e of 256, and s is at most 1024. Its steps take at
            most 240,000 scalars: three for each head of each row, and one for each row and for each 128 to 512 slots of
            the pool.

    Raises:
        ValueError: values are `LazyRope`.
    """

    q: Float[Array, "b h g d"]
    k: Operand
    v: Operand
    position: Int[Array, "P s"]
    owner: Int[Array, " P"]
    pages: Int[Array, "2"]
    query_position: Int[Array, " b"]
    spec: AttentionSpec
    _: dataclasses.KW_ONLY
    places: Places | None = None
    logits: Float[Array, "P g s"] | None = None
    layers: int = static(1)

    name = "paged_attention"
    backends = ("pallas_tpu", "pallas_gpu")

    def validate(self) -> Self:
        refuse_lazy_rope(self.v)
        return self

    def limits(self, backend: str) -> Iterator[Limit]:
        yield from operand_limits(self.q, self.k, self.v, self.spec, self.places)
        yield from width_limits(self.k, self.v, backend)
        if backend == "pallas_tpu":
            four = [x for x in (self.k, self.v) if isinstance(x, Quantised) and x.bits == 4]
            aligned = all(x.codes.shape[-1] % LANES == 0 for x in four)
            yield aligned, "pages of four bits would be copied at every step, unless d and e are 256"
            (b, h), (pages, size) = self.q.shape[:2], self.k.shape[:2]
            yield size <= 1024, f"s={size} slots in a page are more than 1024"
            kernel = self.module(backend)
            numbers = kernel.scalar_count(b, b * h, pages, kernel.tile(b * h, self.layers, pages, size))
            text = f"its steps take {numbers} scalars for rows, heads and pages, more than {kernel.MAX_SCALARS}"
            yield numbers <= kernel.MAX_SCALARS, text

    def workload(self) -> tuple[dict[str, int], dict[str, Any]]:
        settings = operand_settings(self.q, self.k, self.v, self.spec)
        return dict(b=self.q.shape[0], pages=self.k.shape[0]), dict(slots=self.k.shape[1]) | settings


paged_attention = operation(PagedAttention)


def ranges(owner: Int[Array, " P"], pages: Int[Array, "2"], owners: int) -> tuple[Int[Array, " o"], Int[Array, " o"]]:
    """Return each owner's first page in a layer, and the one after its last."""
    page = jnp.arange(owner.shape[0])
    rising = jnp.where(page < pages[0], -1, jnp.where(page < pages[1], owner, owners))
    first_pages = jnp.searchsorted(rising, jnp.arange(owners + 1)).astype(jnp.int32)
    return first_pages[:-1], first_pages[1:]
