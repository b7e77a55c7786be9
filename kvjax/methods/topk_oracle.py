"""Oracle of LESS: every query attends to the k keys of a full cache with its highest logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from kvjax.methods.full import Unbounded
from kvjax.methods.register import combine, register, register_part
from kvjax.methods.window import Recency
from kvjax.policies import Policy, Selection
from kvjax.types import LayerTokens, Limit, check, is_share, number

_K = Limit(lambda k: k >= 1 if isinstance(k, int) else 0 < k <= 1, "a number of tokens from 1, or a fraction up to 1.0")


@register_part("topk")
class TopK(Selection):
    r"""Selection of the k cached keys with the highest logits of each query.

    .. math:: o = \mathrm{softmax}(q K_S^\top / \sqrt d) V_S, \quad S = \text{the k largest of}\ q K^\top

    From: LESS, arXiv 2402.09398, Figure 3.

    When: as an upper bound for caches of fixed size. It frees no memory.

    Args:
        k: number of tokens that each query attends to, or a fraction of the visible ones; None for the budget.
    """

    k: int | float | None = number(None, _K)

    def budgeted(self, budget: Any) -> TopK:
        """Return a copy whose k is the budget, unless k was given."""
        if self.k is not None:
            return self
        check(isinstance(budget, (int, float)), "budget", budget, "one number, which topk_oracle takes as k")
        return self.replace(k=budget)

    def pick(self, probs: Float[Array, "b h g t c"], new: LayerTokens) -> Bool[Array, "b h g t c"]:
        if self.k is None:
            raise ValueError("topk_oracle has no k: give a budget, as prefill does.")
        k: Any = jnp.ceil(self.k * (probs > 0).sum(-1, keepdims=True)) if is_share(self.k) else self.k
        return largest(probs, k) & (probs > 0)


def largest(probs: Float[Array, "*n c"], k: int | Num[Array, "*#n 1"] | Num[Array, ""]) -> Bool[Array, "*n c"]:
    """Return a mask of the k largest of numbers in [0, 2) along the last axis; among equal ones the first count."""
    # Counting finds the k-th in as many passes as a number has bits, many times faster than sorting long rows on a
    # CPU: bits of numbers that are not negative have the order of the numbers.
    width = jnp.finfo(probs.dtype).bits
    bits = jax.lax.bitcast_convert_type(probs, jnp.dtype(f"int{width}"))
    place = jax.lax.broadcasted_iota(jnp.int32, probs.shape, probs.ndim - 1)

    def largest_fitting(fits: Callable[[Array], Array], bits: int, dtype: Any) -> Array:
        # The largest number of so many bits that fits, where every smaller one does, too.
        def try_bit(i: Array, prefix: Array) -> Array:
            more = prefix | (jnp.ones((), dtype) << (bits - 1 - i)).astype(dtype)
            return jnp.where(fits(more), more, prefix)

        return jax.lax.fori_loop(0, bits, try_bit, jnp.zeros((*probs.shape[:-1], 1), dtype))

    def count(mask: Array) -> Array:
        return mask.sum(-1, keepdims=True)

    kth = largest_fitting(lambda threshold: count(bits >= threshold) >= k, width - 2, bits.dtype)
    above, equal = bits > kth, bits == kth
    room = k - count(above)
    end = largest_fitting(lambda end: count(equal & (place < end)) <= room, probs.shape[-1].bit_length(), jnp.int32)
    return above | (equal & (place < end))


@register(paper="LESS, Figure 3", group="nothing is evicted")
def topk_oracle(*, k: int | float | None = TopK.k, **common: Any) -> Policy:
    """Attend to the k keys with the highest logits of each query, from a full cache; it frees no memory.

    When: as an upper bound for eviction. With a tenth of the cached keys perplexity is 13.8, with all of them 12.6, and
    18.0 under `h2o` with a tenth of the slots (SmolLM2 on WikiText-2).
    """
    return combine(Recency(), plan=Unbounded(), selection=TopK(k), **common)
