"""Compactor: the leverage of keys, and attention without a causal mask."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from kvjax.methods.leverage import Leverage
from kvjax.methods.noncausal import noncausal_attention
from kvjax.methods.register import register_score
from kvjax.types import New, View, check, setting


@register_score("compactor", paper="Compactor, 2025", group="ranked once for each prompt or turn", sinks=8, recent=32)
@struct.dataclass
class Compacted(Leverage):
    r"""Weighted sum of the leverage of keys and of attention without a causal mask, both in z-scores.

    .. math:: F(i) = \lambda \, \mathrm{leverage}(i) + \mathrm{noncausal}(i)

    When: if a prompt is compressed before the question is known. It has not been measured on many models yet. The paper
    keeps the last 4 tokens and evicts nothing after the prompt. Here generated tokens are evicted first, except the
    newest `recent` ones.

    Args:
        chunk: number of tokens in a chunk of non-causal attention.
        blending: lambda; None for the fraction of the text's tokens that are evicted.
    """

    chunk: int = setting(256)
    blending: float | None = setting(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.chunk >= 1, "chunk", self.chunk, "a number of tokens from 1")

    def _of_text(self, view: View, new: New, counts: Bool[Array, "b h t"]) -> Float[Array, "b h t"]:
        share: Any = self.blending
        if share is None:
            held = jnp.maximum(view.live.sum(-1), 1)
            share = jnp.maximum(1 - view.limit / held, 0.0)[..., None]
        return share * super()._of_text(view, new, counts) + noncausal_attention(new, counts, self.sinks, self.chunk)
