"""A decode step in XLA: eviction, then attention."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.common import Survey
from pallas_kernels.evict.api import Evict
from pallas_kernels.evict.reference import write_slots
from pallas_kernels.fused_decode.api import FusedDecode, FusedResult, Hashed, Slots
from pallas_kernels.hamming import distances
from pallas_kernels.hamming.api import HammingVictim
from pallas_kernels.op import Options
from pallas_kernels.operands import Quantised, quantise


def fused_decode(x: FusedDecode, options: Options) -> FusedResult:
    position, *pair, buffers = x.slots
    newest, *new, entry = x.token
    new = [quantise(y, old.bits) if isinstance(old, Quantised) else y for y, old in zip(new, pair, strict=True)]
    importance, words, word = x.ranking.importance, None, None
    choice: dict[str, Any] = dict(protection=x.ranking.protection, keep=x.ranking.keep)
    # A survey records the two calls that are made if one pass does not win.
    surveyed = isinstance(options.implementation, Survey)
    if isinstance(importance, Hashed):
        hashing, words = importance
        word = tuple(word[:, :, 0] for word in hashing.of_keys())
        queries = hashing.of_queries()
        importance = -distances(queries, words).astype(jnp.float32)
        if surveyed:
            HammingVictim(queries, words, position, newest, **choice)(**options._asdict())
    contents, added = (((*pair, buffers), words), ((*new, entry), word))
    choice |= {"shrinks": x.ranking.shrinks, "pairs": x.pairs}
    eviction = Evict(importance, position, newest, contents, added, **choice)
    result = eviction(**options._asdict()) if surveyed and words is None else eviction.reference(options)
    slot, evicted_position, evicted, position, ((k, v, buffers), codes) = result
    slots = Slots(position, k, v, buffers)
    attention = x.attention(slots)
    attended = attention(**options._asdict()) if surveyed else attention.reference(options)
    if x.adds:
        assert importance is not None and attended.scores is not None
        zeroed = write_slots(importance, slot, jnp.zeros(slot.shape, importance.dtype))
        attended = attended._replace(scores=zeroed + attended.scores)
    if x.rounds:
        attended = attended._replace(out=attended.out.astype(x.query.q.dtype))
    return FusedResult(attended, slot, evicted_position, slots, evicted[0][:2] if x.pairs else None, codes)
