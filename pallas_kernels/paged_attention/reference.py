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

    def add_block(i: Array, carry: Any) -> Any:
        highest, total, out, logits = carry
        first = pages[0] + i * block
        at = jnp.minimum(first, count - block)  # the last block of the pool begins earlier
        page = at + jnp.arange(block)
        valid = (page >= first) & (page < pages[1])

        def block_of(pages: Any) -> Any:
            return cut(pages, at, block, 0)

        owner_of_page, block_position = block_of(owner), block_of(position)
        block_logits = spec.capped(query_products(queries[owner_of_page], block_of(k), options.platform))
        if spec.slopes is not None:
            distance = block_of(key_place) - query_place.reshape(-1)[owner_of_page, None]
            block_logits += (spec.slopes[owner_of_page % h][..., None] * distance[:, None]).astype(block_logits.dtype)
        visible = spec.mask(x.query_position[owner_of_page // h, None], block_position[:, None])[:, 0]
        block_logits = jnp.where(visible, block_logits, lowest)
        logits = jax.lax.dynamic_update_slice_in_dim(logits, block_logits, at, 0)
        block_logits = jnp.where(valid[:, None, None], block_logits, lowest)
        members = (owner_of_page == jnp.arange(owners)[:, None]) & valid
        top = jnp.where(members[..., None], block_logits.max(-1), lowest).max(1)
        new_highest = jnp.maximum(highest, jnp.maximum(top, lowest / 2))
        weights = jnp.exp(block_logits - new_highest[owner_of_page][..., None])
        block_out = weighted_values(weights, block_of(v), q.dtype, options.platform)
        share, correction = members.astype(kind), jnp.exp(highest - new_highest)
        total = correction * total + jnp.einsum("op,pg->og", share, weights.sum(-1))
        return new_highest, total, correction[..., None] * out + jnp.einsum("op,pgd->ogd", share, block_out), logits

    carry = (
        jnp.full((owners, g), lowest / 2, kind),
        jnp.zeros((owners, g), kind),
        jnp.zeros((owners, g, v.shape[-1]), kind),
        jnp.zeros((count, g, size), kind) if x.logits is None else x.logits,
    )
    blocks = (pages[1] - pages[0] + block - 1) // block
    highest, total, out, logits = jax.lax.fori_loop(0, blocks, add_block, carry)
    normalized = out / positive(total)[..., None]
    return PagedResult(normalized.reshape(b, h, g, -1), log_sum(highest, total).reshape(b, h, g), logits)
