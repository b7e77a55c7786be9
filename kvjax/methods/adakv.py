"""Ada-KV: slots of a layer, split over its heads by the number of highly ranked tokens in each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.methods.register import register_part
from kvjax.policies.allocation import Sizing, Uniform
from kvjax.types import Heads, LayerTokens, PyTree, number, one_of, setting, share


@register_part("adakv")
class AdaKV(Uniform, interface=True):
    r"""Equal numbers of slots for layers, and within a layer more for heads with more highly ranked tokens.

    .. math:: C_h = f C + (1 - f) n_h, \quad n_h = \text{tokens of head}\ h\ \text{among the layer's}\ H C\ \text{best}

    n_h counts the tokens of head h among the H C tokens that rank highest in the whole layer. Each head gets a fraction
    f (the setting `floor`) of the average C, and the rest in proportion to its count. Per row and layer, the slots of
    all heads sum to H C, unless a head would get more slots than the text has tokens. With `over="model"` the heads of
    all layers compete with each other, for scores that compare between layers; the cache then holds the whole prompt
    until all layers have read it.

    From: Ada-KV, Feng et al. 2024, Algorithm 1.

    When: if the heads of a layer differ much. In SmolLM2, with 3 KV heads, it gains nothing over `h2o`: 15.2 instead of
    14.9 in perplexity with a quarter of the slots, 18.3 instead of 18.0 with a tenth (WikiText-2), and pages take more
    bytes.

    Args:
        floor: fraction of the average that every head gets, in [0, 1]; 0.2 in the published code.
        over: heads that compete with each other, those of a `layer` or of the whole `model`.
    """

    floor: float = number(0.2, share("a share of the average budget"))
    over: str = setting("layer", one_of("layer", "model"))

    @property
    def sizing(self) -> Sizing:
        return Sizing(per_head=True, all_layers=self.over == "model")

    def head_budgets(
        self, stats: PyTree, view: Heads, ranks: Float[Array, "b h c"] | None, new: LayerTokens
    ) -> tuple[Int[Array, "b h"], PyTree]:
        """Return the slots of each head, by the number of its tokens among the highest-ranked ones of all heads."""
        assert ranks is not None
        all_ranks, budget = new.spread.all_heads(ranks), new.spread.all_heads(view.limit)
        limit = self.split(all_ranks, budget, (new.read + new.horizon)[:, None])
        return new.spread.own_heads(limit), view.state.plan

    def split(
        self, ranks: Float[Array, "b h c"], budget: Int[Array, "b h"], length: Int[Array, "b 1"]
    ) -> Int[Array, "b h"]:
        """Return the slots of each KV head, `length` at the most: the tokens of the whole text."""
        rows, heads, slots = ranks.shape
        total = budget.sum(1, keepdims=True)
        head = jnp.broadcast_to(jnp.arange(heads)[:, None], ranks.shape).reshape(rows, -1)
        worth = jnp.where(ranks > jnp.finfo(ranks.dtype).min, -ranks, jnp.inf).reshape(rows, -1)
        worth, head = jax.lax.sort((worth, head), num_keys=1)
        # Protected slots rank +inf: they come first, as they will when slots are given out.
        best = (jnp.arange(heads * slots) < total) & (worth < jnp.inf)
        counts = (best[:, None] & (head[:, None] == jnp.arange(heads)[:, None])).sum(-1)
        # Slots without a token to compete for them; heads of layers that keep to a window have no budget.
        part = budget > 0
        unclaimed = (total - counts.sum(1, keepdims=True)) / jnp.maximum(part.sum(1, keepdims=True), 1)
        shares = self.floor * budget + (1 - self.floor) * (counts + jnp.where(part, unclaimed, 0))
        slots_of_heads = jnp.floor(shares + 1e-4).astype(jnp.int32)
        # Of equal remainders the first head's counts, whichever way a program rounds them.
        remainders = jnp.round((shares - slots_of_heads) * 64)
        order = jnp.argsort(jnp.argsort(-remainders, axis=-1, stable=True), axis=-1)
        slots_of_heads += order < total - slots_of_heads.sum(1, keepdims=True)
        return jnp.minimum(slots_of_heads, length).astype(jnp.int32)
