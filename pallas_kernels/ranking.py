"""Which slot the next token takes, written so that XLA and kernels for TPU run the same lines."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Protection(NamedTuple):
    """What may leave a head, and how many slots it may use."""

    sinks: Int[Array, "b h"]
    """First positions that never leave."""
    recent: Int[Array, "b h"]
    """Newest tokens that never leave, the new one included."""
    limit: Int[Array, "b h"]
    """Slots that the head may use."""


def victim(
    scores: Float[Array, "*b c"],
    position: Int[Array, "*b c"],
    newest: Int[Array, "*b 1"],
    sinks: Int[Array, "*b 1"],
    recent: Int[Array, "*b 1"],
    limit: Int[Array, "*b 1"],
    keep: Bool[Array, "*b c"] | None = None,
    *,
    shrinks: bool = False,
) -> Int[Array, "*b 1"]:
    """The slot of the lowest rank, the oldest of equals: expired < empty < finite scores < protected.

    As `kvjax.cache.victim`, from numbers instead of a policy; `shrinks` is the policy's.
    """
    slot = jax.lax.broadcasted_iota(jnp.int32, position.shape, position.ndim - 1)
    live = position >= 0
    protected = (position < sinks) | (position > newest - recent)
    if keep is not None:
        protected |= keep
    scores = jnp.where(protected & (scores > -jnp.inf), jnp.inf, scores)
    scores = jnp.where(live, scores, jnp.finfo(scores.dtype).min)
    if shrinks:
        usable = live | (jnp.where(live, 1, 0).sum(-1, keepdims=True) < limit)
    else:
        usable = slot < limit
    scores = jnp.where(usable, scores, jnp.inf)
    lowest = usable & (scores == scores.min(-1, keepdims=True))
    last = jnp.iinfo(jnp.int32).max
    age = jnp.where(lowest, position, last)
    oldest = age == age.min(-1, keepdims=True)
    return jnp.where(oldest, slot, last).min(-1, keepdims=True)
