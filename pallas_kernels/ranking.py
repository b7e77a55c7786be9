"""Which slot the next token takes, written so that XLA and kernels for TPU run the same lines."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int


class Protection(NamedTuple):
    """What may leave a head, and how many slots it may use."""

    sinks: Int[Array, "b h"] | Int[Array, ""]
    """First positions that never leave; one number where it is the same in all heads of all rows."""
    recent: Int[Array, "b h"] | Int[Array, ""]
    """Newest tokens that never leave, the new one included; one number, too, where it can be."""
    limit: Int[Array, "b h"]
    """Slots that the head may use."""

    def of_heads(self) -> Protection:
        """With numbers of each head."""
        return Protection(*(jnp.broadcast_to(x, self.limit.shape).astype(jnp.int32) for x in self))


def rank(
    scores: Float[Array, "*b c"] | None,
    position: Int[Array, "*b c"],
    newest: Int[Array, "*b 1"],
    sinks: Int[Array, "*b 1"],
    recent: Int[Array, "*b 1"],
    keep: Bool[Array, "*b c"] | None = None,
) -> Float[Array, "*b c"]:
    """Order of leaving: expired (-inf) < empty < scores < protected < sinks (+inf); by position without scores."""
    stays = position > newest - recent
    if keep is not None:
        stays |= keep
    kind = jnp.float32 if scores is None else scores.dtype
    # A score may be infinite, too.
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
    newest: Int[Array, "*b 1"],
    sinks: Int[Array, "*b 1"],
    recent: Int[Array, "*b 1"],
    limit: Int[Array, "*b 1"],
    keep: Bool[Array, "*b c"] | None = None,
    *,
    shrinks: bool = False,
) -> Int[Array, "*b 1"]:
    """The slot of the lowest rank, the oldest of equals; slots beyond the limit never.

    Where a budget `shrinks`, what stays of a larger cache lies anywhere in the buffers, so live slots count as within.
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
