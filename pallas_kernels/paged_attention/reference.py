"""Attention over pages in XLA: a loop over blocks of pages, each page a split, merged by owner."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import wide
from pallas_kernels.paged_attention.types import Paged

PAGE_BLOCK = 64
"""Pages that are looked at together, at most."""


def paged_attention(
    q: Float[Array, "b h g d"],
    k: Float[Array, "P s d"],
    v: Float[Array, "P s d"],
    position: Int[Array, "P s"],
    owner: Int[Array, " P"],
    pages: Int[Array, "2"],
    query_position: Int[Array, " b"],
    *,
    window: int | None,
    slopes: Float[Array, "h g"] | None,
    logits: Float[Array, "P g s"] | None,
) -> Paged:
    """See `api.paged_attention`."""
    b, h, g, d = q.shape
    count, size = position.shape
    owners, kind = b * h, wide(q.dtype)
    queries = q.reshape(owners, g, d)
    lowest = jnp.finfo(kind).min
    block = min(PAGE_BLOCK, count)

    def look(i, carry):
        highest, total, out, logits = carry
        wanted = pages[0] + i * block
        at = jnp.minimum(wanted, count - block)  # the last block of the pool looks back
        page = at + jnp.arange(block)
        valid = (page >= wanted) & (page < pages[1])

        def cut(leaf: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(leaf, at, block)

        whose, where = cut(owner), cut(position)
        query = query_position[whose // h, None]
        x = jnp.einsum("pgd,psd->pgs", queries[whose], cut(k), preferred_element_type=kind) / math.sqrt(d)
        if slopes is not None:
            x += slopes[whose % h][..., None] * (where - query)[:, None]
        seen = (where >= 0) & (where <= query)
        if window is not None:
            seen &= where > query - window
        x = jnp.where(seen[:, None], x, lowest)
        logits = jax.lax.dynamic_update_slice_in_dim(logits, x, at, 0)
        x = jnp.where(valid[:, None, None], x, lowest)
        members = (whose == jnp.arange(owners)[:, None]) & valid
        here = jnp.where(members[..., None], x.max(-1), lowest).max(1)
        now = jnp.maximum(highest, jnp.maximum(here, lowest / 2))
        weights = jnp.exp(x - now[whose][..., None])
        read = jnp.einsum("pgs,psd->pgd", weights.astype(v.dtype), cut(v), preferred_element_type=kind)
        share, kept = members.astype(kind), jnp.exp(highest - now)
        total = kept * total + jnp.einsum("op,pg->og", share, weights.sum(-1))
        return now, total, kept[..., None] * out + jnp.einsum("op,pgd->ogd", share, read), logits

    carry = (
        jnp.full((owners, g), lowest / 2, kind),
        jnp.zeros((owners, g), kind),
        jnp.zeros((owners, g, d), kind),
        jnp.zeros((count, g, size), kind) if logits is None else logits,
    )
    blocks = (pages[1] - pages[0] + block - 1) // block
    highest, total, out, written = jax.lax.fori_loop(0, blocks, look, carry)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    lse = jnp.where(some, highest + jnp.log(total), -jnp.inf)
    return Paged((out / total[..., None]).reshape(q.shape), lse.reshape(b, h, g), written)
