"""Attention over pages in XLA: a loop over blocks of pages, each page a split, merged by owner."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.attention import log_sum, positive, wide
from pallas_kernels.op import Options
from pallas_kernels.operands import cut
from pallas_kernels.paged_attention.api import PagedAttention, PagedResult
from pallas_kernels.quantised import query_products, weighted_values

PAGE_BLOCK = 64
"""Maximum pages of one loop step."""


def paged_attention(x: PagedAttention, options: Options) -> PagedResult:
    (q, k, v, spec), (position, owner, pages) = (x.q, x.k, x.v, x.spec), (x.position, x.owner, x.pages)
    b, h, g, d = q.shape
    count, size = position.shape
    owners, kind = b * h, wide(q.dtype)
    queries = q.reshape(owners, g, d)
    query_place, key_place = (jnp.repeat(x.query_position, h), position) if x.places is None else x.places
    lowest = jnp.finfo(kind).min
    block = min(PAGE_BLOCK, count)

    def look(i: Array, carry: Any) -> Any:
        highest, total, out, logits = carry
        wanted = pages[0] + i * block
        at = jnp.minimum(wanted, count - block)  # the last block of the pool begins earlier
        page = at + jnp.arange(block)
        valid = (page >= wanted) & (page < pages[1])

        def here(pages: Any) -> Any:
            return cut(pages, at, block, 0)

        whose, where = here(owner), here(position)
        found = spec.capped(query_products(queries[whose], here(k), options.platform))
        if spec.slopes is not None:
            distance = here(key_place) - query_place.reshape(-1)[whose, None]
            found += (spec.slopes[whose % h][..., None] * distance[:, None]).astype(found.dtype)
        seen = spec.mask(x.query_position[whose // h, None], where[:, None])[:, 0]
        found = jnp.where(seen, found, lowest)
        logits = jax.lax.dynamic_update_slice_in_dim(logits, found, at, 0)
        found = jnp.where(valid[:, None, None], found, lowest)
        members = (whose == jnp.arange(owners)[:, None]) & valid
        top = jnp.where(members[..., None], found.max(-1), lowest).max(1)
        now = jnp.maximum(highest, jnp.maximum(top, lowest / 2))
        weights = jnp.exp(found - now[whose][..., None])
        read = weighted_values(weights, here(v), q.dtype, options.platform)
        share, kept = members.astype(kind), jnp.exp(highest - now)
        total = kept * total + jnp.einsum("op,pg->og", share, weights.sum(-1))
        return now, total, kept[..., None] * out + jnp.einsum("op,pgd->ogd", share, read), logits

    carry = (
        jnp.full((owners, g), lowest / 2, kind),
        jnp.zeros((owners, g), kind),
        jnp.zeros((owners, g, v.shape[-1]), kind),
        jnp.zeros((count, g, size), kind) if x.logits is None else x.logits,
    )
    blocks = (pages[1] - pages[0] + block - 1) // block
    highest, total, out, written = jax.lax.fori_loop(0, blocks, look, carry)
    found = out / positive(total)[..., None]
    return PagedResult(found.reshape(b, h, g, -1), log_sum(highest, total).reshape(b, h, g), written)
