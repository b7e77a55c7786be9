"""The upper bound: exact top-k attention over a full cache."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import struct

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
        place = jnp.argsort(jnp.argsort(-probs, axis=-1, stable=True), axis=-1)
        strongest = jnp.where(place < k, probs, 0.0)
        mass = strongest.sum(-1, keepdims=True)
        share = strongest / jnp.where(mass > 0, mass, 1.0)
        out = jnp.einsum("bhgtc,bhcd->bhgtd", share, cache.kv.v.astype(share.dtype))
        return Partial(out, partial.lse + jnp.log(jnp.where(mass > 0, mass, 1.0))[..., 0])
