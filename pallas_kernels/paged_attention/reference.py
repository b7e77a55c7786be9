"""Attention over pages in XLA: a loop over blocks of pages, each page a split, merged by owner."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import AttentionSpec, wide
from pallas_kernels.operands import Operand, cut
from pallas_kernels.paged_attention.types import Paged, Places
from pallas_kernels.quantised import products, weighted

PAGE_BLOCK = 64
"""Maximum pages of one loop step."""


def paged_attention(
    q: Float[Array, "b h g d"],
    k: Operand,
    v: Operand,
    position: Int[Array, "P s"],
    owner: Int[Array, " P"],
    pages: Int[Array, "2"],
    query_position: Int[Array, " b"],
    spec: AttentionSpec,
    *,
    places: Places | None,
    logits: Float[Array, "P g s"] | None,
    platform: str,
) -> Paged:
    """See `api.paged_attention`."""
    b, h, g, d = q.shape
    count, size = position.shape
    owners, kind = b * h, wide(q.dtype)
    queries = q.reshape(owners, g, d)
    query_place, key_place = (jnp.repeat(query_position, h), position) if places is None else places
    lowest = jnp.finfo(kind).min
    block = min(PAGE_BLOCK, count)

    def look(i: Array, carry: Any) -> Any:
        highest, total, out, logits = carry
        wanted = pages[0] + i * block
        at = jnp.minimum(wanted, count - block)  # the last block of the pool begins earlier
        page = at + jnp.arange(block)
        valid = (page >= wanted) & (page < pages[1])

        def here(x: Any) -> Any:
            return cut(x, at, block, 0)

        whose, where = here(owner), here(position)
        x = spec.capped(products(queries[whose], here(k), platform))
        if spec.slopes is not None:
            distance = here(key_place) - query_place.reshape(-1)[whose, None]
            x += spec.slopes[whose % h][..., None] * distance[:, None]
        seen = spec.mask(query_position[whose // h, None], where[:, None])[:, 0]
        x = jnp.where(seen, x, lowest)
        logits = jax.lax.dynamic_update_slice_in_dim(logits, x, at, 0)
        x = jnp.where(valid[:, None, None], x, lowest)
        members = (whose == jnp.arange(owners)[:, None]) & valid
        top = jnp.where(members[..., None], x.max(-1), lowest).max(1)
        now = jnp.maximum(highest, jnp.maximum(top, lowest / 2))
        weights = jnp.exp(x - now[whose][..., None])
        read = weighted(weights, here(v), q.dtype, platform)
        share, kept = members.astype(kind), jnp.exp(highest - now)
        total = kept * total + jnp.einsum("op,pg->og", share, weights.sum(-1))
        return now, total, kept[..., None] * out + jnp.einsum("op,pgd->ogd", share, read), logits

    carry = (
        jnp.full((owners, g), lowest / 2, kind),
        jnp.zeros((owners, g), kind),
        jnp.zeros((owners, g, v.shape[-1]), kind),
        jnp.zeros((count, g, size), kind) if logits is None else logits,
    )
    blocks = (pages[1] - pages[0] + block - 1) // block
    highest, total, out, written = jax.lax.fori_loop(0, blocks, look, carry)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    lse = jnp.where(some, highest + jnp.log(total), -jnp.inf)
    return Paged((out / total[..., None]).reshape(b, h, g, -1), lse.reshape(b, h, g), written)
