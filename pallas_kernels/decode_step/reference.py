"""A decode step in XLA: eviction, then attention."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention import AttentionSpec
from pallas_kernels.decode_attention import Gumbel, Sinks
from pallas_kernels.decode_attention import reference as attention
from pallas_kernels.decode_step.types import Hashed, Stepped
from pallas_kernels.evict import reference as eviction
from pallas_kernels.evict.reference import written_through
from pallas_kernels.hamming import distances
from pallas_kernels.operands import Operand, Quantised, quantise
from pallas_kernels.ranking import Protection


def decode_step(
    standing: Float[Array, "b h c"] | Hashed | None,
    position: Int[Array, "b h c"],
    new_position: Int[Array, " b"],
    k: Operand,
    v: Operand,
    buffers: Any,
    added: tuple[Float[Array, "b h d"], Float[Array, "b h e"], Any],
    q: Float[Array, "b h g d"],
    spec: AttentionSpec,
    *,
    protection: Protection,
    keep: Bool[Array, "b h c"] | None,
    shrinks: bool,
    pairs: bool,
    sinks: Sinks | None,
    scores: str | Gumbel | None,
    adds: bool,
    rounds: bool,
    platform: str,
) -> Stepped:
    """See `api.decode_step`."""
    pair = [quantise(x, held.bits) if isinstance(held, Quantised) else x for x, held in ((added[0], k), (added[1], v))]
    held, entry = ((k, v, buffers), None), ((*pair, added[2]), None)
    if isinstance(standing, Hashed):
        hashing, codes = standing
        held, entry = ((k, v, buffers), codes), ((*pair, added[2]), tuple(word[:, :, 0] for word in hashing.of_keys()))
        standing = -distances(hashing.of_queries(), codes).astype(jnp.float32)
    choice: dict[str, Any] = dict(protection=protection, keep=keep, shrinks=shrinks, pairs=pairs)
    slot, left, taken, position, ((k, v, buffers), codes) = eviction.evict(
        standing, position, new_position, held, entry, **choice
    )
    asked: dict[str, Any] = dict(places=None, low_rank=None, sinks=sinks, scores=scores, platform=platform)
    attended = attention.decode_attention(q, k, v, position, new_position, spec, **asked)
    if adds:
        assert standing is not None and attended.scores is not None
        begun = written_through(standing, slot, jnp.zeros(slot.shape, standing.dtype))
        attended = attended._replace(scores=begun + attended.scores)
    if rounds:
        attended = attended._replace(out=attended.out.astype(q.dtype))
    return Stepped(attended, slot, left, position, k, v, buffers, taken[0][:2] if pairs else None, codes)
