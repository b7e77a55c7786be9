"""The upper bound: exact top-k attention over a full cache."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from kvjax.policies.base import Policy, check
from kvjax.types import Partial, setting, wide


@struct.dataclass(kw_only=True)
class TopKOracle(Policy):
    """The k strongest keys of every query, chosen with a full cache: it frees nothing and says so.

    The budget is k: a number of tokens, or a fraction of those that the query sees; every query of the prompt is
    restricted, too.

    Args:
        k: tokens that each query reads, or a fraction of those it sees; None for the budget.
    """

    evicts = False
    needs_probs = True
    paper = "LESS, arXiv 2402.09398, Figure 3"

    k: int | float | None = setting(None)

    def __post_init__(self):
        super().__post_init__()
        whole = isinstance(self.k, int) and self.k >= 1
        fraction = isinstance(self.k, float) and 0 < self.k <= 1
        check(self.k is None or whole or fraction, "k", self.k, "a number of tokens from 1, or a fraction up to 1.0")

    def budgeted(self, budget):
        """The budget is k, unless k was given."""
        if self.k is not None:
            return self
        check(isinstance(budget, (int, float)), "budget", budget, "one number, which topk_oracle takes as k")
        return dataclasses.replace(self, k=budget)

    def score(self, cache, new):
        """Never asked for: nothing leaves."""
        return jnp.zeros(cache.position.shape, wide(new.k.dtype))

    def attended(self, cache, partial, probs, new):
        """Softmax over the k largest logits of each query."""
        if self.k is None:
            raise ValueError("topk_oracle has no k: give a budget, as prefill does.")
        k = self.k if isinstance(self.k, int) else jnp.ceil(self.k * (probs > 0).sum(-1, keepdims=True))
        strongest = jnp.where(largest(probs, k), probs, 0.0)
        mass = strongest.sum(-1, keepdims=True)
        share = strongest / jnp.where(mass > 0, mass, 1.0)
        out = jnp.einsum("bhgtc,bhcd->bhgtd", share, cache.kv.v.astype(share.dtype))
        return Partial(out, partial.lse + jnp.log(jnp.where(mass > 0, mass, 1.0))[..., 0])


def largest(probs: Float[Array, "*n c"], k: int | Float[Array, "*n 1"]) -> Bool[Array, "*n c"]:
    """Which are the k largest of a row of numbers from 0 to below 2, the first ones of equals."""
    # Counting finds the k-th in as many passes as a number has bits, many times faster than sorting long rows on a
    # CPU: bits of numbers that are not negative have the order of the numbers.
    width = jnp.finfo(probs.dtype).bits
    bits = jax.lax.bitcast_convert_type(probs, jnp.dtype(f"int{width}"))
    place = jax.lax.broadcasted_iota(jnp.int32, probs.shape, probs.ndim - 1)

    def bound(fits, bits: int, dtype):
        # The largest number of so many bits that fits, where every smaller one does, too.
        def try_bit(i, found):
            more = found | (jnp.ones((), dtype) << (bits - 1 - i)).astype(dtype)
            return jnp.where(fits(more), more, found)

        return jax.lax.fori_loop(0, bits, try_bit, jnp.zeros((*probs.shape[:-1], 1), dtype))

    def count(mask):
        return mask.sum(-1, keepdims=True)

    kth = bound(lambda least: count(bits >= least) >= k, width - 2, bits.dtype)
    above, equal = bits > kth, bits == kth
    room = k - count(above)
    end = bound(lambda end: count(equal & (place < end)) <= room, probs.shape[-1].bit_length(), jnp.int32)
    return above | (equal & (place < end))
