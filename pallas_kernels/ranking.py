"""Selection of the slot that the next token takes; XLA and TPU kernels run the same lines."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

PerHead = Int[Array, "*#b 1"] | Int[Array, ""]
"""A number for each head, or one for all."""


class EvictionRules(NamedTuple):
    """Tokens that a head must not evict, and the slots that it may use."""

    sinks: Int[Array, "b h"] | Int[Array, ""]
    """Number of first positions that are never evicted; a single number if all heads of all rows share it."""
    recent: Int[Array, "b h"] | Int[Array, ""]
    """Number of newest tokens that are never evicted, including the new one; also a single number if shared."""
    limit: Int[Array, "b h"]
    """Slots that the head may use."""

    def of_heads(self) -> EvictionRules:
        """Broadcast all numbers to every head."""
        return EvictionRules(*(jnp.broadcast_to(x, self.limit.shape).astype(jnp.int32) for x in self))


def rank(
    scores: Float[Array, "*b c"] | None,
    position: Int[Array, "*b c"],
    newest: PerHead,
    sinks: PerHead,
    recent: PerHead,
    keep: Bool[Array, "*b c"] | None = None,
) -> Float[Array, "*b c"]:
    """Rank slots by eviction order: expired (-inf) < empty < scores < protected < sinks (+inf).

    Without scores, unprotected tokens rank by position.
    """
    stays = position > newest - recent
    if keep is not None:
        stays |= keep
    kind = jnp.float32 if scores is None else scores.dtype
    # A score may be infinite, too, but must not exceed protected tokens.
    ranks = position.astype(kind) if scores is None else jnp.minimum(scores, protected(kind))
    ranks = jnp.where(position < sinks, jnp.inf, jnp.where(stays, protected(kind), ranks))
    if scores is not None:
        ranks = jnp.where(scores > -jnp.inf, ranks, scores)
    return jnp.where(position >= 0, ranks, jnp.finfo(kind).min)


def protected(dtype: DTypeLike) -> float:
    """Return the rank of protected tokens, which only sinks exceed."""
    return float(jnp.finfo(dtype).max)


def victim(
    scores: Float[Array, "*b c"] | None,
    position: Int[Array, "*b c"],
    newest: PerHead,
    sinks: PerHead,
    recent: PerHead,
    limit: PerHead,
    keep: Bool[Array, "*b c"] | None = None,
    *,
    shrinks: bool = False,
) -> Int[Array, "*b 1"]:
    """Return the slot of the lowest rank, among equal ranks the oldest, and never a slot beyond the limit.

    If a budget `shrinks`, tokens kept from a larger cache may be in any slot, so all live slots count as within the
    limit.
    """
    slot = jax.lax.broadcasted_iota(jnp.int32, position.shape, position.ndim - 1)
    ranks = rank(scores, position, newest, sinks, recent, keep)
    if shrinks:
        live = position >= 0
        usable = live | (jnp.where(live, 1, 0).sum(-1, keepdims=True) < limit)
    else:
        usable = slot < limit
    ranks = jnp.where(usable, ranks, jnp.inf)
    lowest = usable & (ranks == ranks.min(-1, keepdims=True))
    last = jnp.iinfo(jnp.int32).max
    age = jnp.where(lowest, position, last)
    oldest = age == age.min(-1, keepdims=True)
    return jnp.where(oldest, slot, last).min(-1, keepdims=True)
