"""VaSE (arXiv 2606.03928): tokens with the largest value ranges, and a random sample by attention of the others."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.methods.cur import projected
from kvjax.methods.neighbors import in_text_order, pooled
from kvjax.methods.register import register_score
from kvjax.methods.step_windows import begin, ended, shifted, weights
from kvjax.policies import AttentionSum, Requirements, Score, coarse, recent_slots
from kvjax.types import ODD, Heads, LayerTokens, View, at_least, nothing, number, one_of, setting, wide
from pallas_kernels.noise import gumbel, uniform_at

COLUMNS = 20
"""Columns of the Gaussian matrix G."""


@register_score("vase", paper="VaSE", group="ranked by attention at every token")
class ValueSpread(Score):
    r"""Tokens with the largest value ranges, and a random sample of the others in proportion to attention.

    .. math::
        F(i) = \begin{cases}
            \infty & i \text{ among the } n_{large} \text{ of the rest with the largest } \max_c v_{ic} - \min_c v_{ic}
            \\ \log \mathrm{pool}_{|j - i| \le 2} \sum_{t > n - r} \sum_g a_{t,g}(j) + \zeta_i & \text{else}
        \end{cases}

    The rest are all tokens except the recent ones. The zeta are independent Gumbel variables, drawn for each ranking,
    so the tokens with the highest sums are a sample without replacement. Attention is pooled over neighbors among the
    rest. The last r queries t are those since the last ranking, or after a prompt, turn or chunk its own last r.

    Ranges, and for `dkv` products of norms, are rounded to 15 significant bits here: equal tokens tie in spite of
    rounding errors, and of tokens that tie the newest are among the largest.

    When: for long generated texts, with a budget of several times `evict_every`. It has not been measured on many
    models yet.

    Args:
        evict_every: r, number of tokens from one ranking to the next; in between a head grows beyond its budget.
        large: n_large, as a number of slots or as a fraction of a head's.
        by: `range` for max v - min v, `dkv` for |k G|^2 |v G|^2 with a Gaussian matrix G drawn for each ranking.
        recent: newest tokens, which are always kept, as a number of slots or as a fraction of a head's.
        sinks: number of first tokens, which rank with the largest ranges; among equal ranks the newest are kept.
        kernel: number of neighbors that are pooled, odd.
    """

    evict_every: int = setting(64, at_least(1, "a number of tokens"))
    large: int | float = number(0.5)
    by: str = setting("range", one_of("range", "dkv"))
    recent: int | float = number(64)
    sinks: int = setting(4)
    kernel: int = setting(5, ODD)

    @property
    def requires(self) -> Requirements:
        return Requirements(whole_heads=True)

    def init_slot(self, new: LayerTokens, state: object) -> tuple[Float[Array, "b h t"], Float[Array, "b h t"]]:
        """Return zeros: attention of the last r queries, and of those since the last multiple of r."""
        return nothing(new), nothing(new)

    def attention_stats(self, heads: Heads, new: LayerTokens) -> AttentionSum | tuple[AttentionSum, ...]:
        """Request the attention of a new token, or in a prompt or turn that for both sums."""
        if not new.given:
            return AttentionSum()
        last = new.position > (new.newest - self.evict_every)[:, None]
        after = new.position >= begin(new, self.evict_every)[:, None]
        return tuple(AttentionSum(weights(queries, new)) for queries in (last, after))

    def update_slot(
        self, stats: Array | tuple[Array, Array], view: View, new: LayerTokens
    ) -> tuple[Float[Array, "b h c"], Float[Array, "b h c"]]:
        """Return both sums with the new queries' attention added."""
        (before,) = shifted(view.slots.score[1:], ended(new, self.evict_every))
        if isinstance(stats, tuple):
            return stats[0], before + stats[1]
        return before + stats, before + stats

    def score(self, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        size = jnp.where(view.position < self.sinks, jnp.inf, self._size(view, new))
        position, size, attention = map(new.spread.all_slots, (view.position, size, view.slots.score[0]))
        recent = jnp.broadcast_to(recent_slots(self.recent, view.limit), view.limit.shape)
        candidates = (position >= 0) & (position <= (new.newest[:, None] - recent)[..., None])
        best_first = jnp.lexsort((-position, jnp.where(candidates, -size, jnp.inf)))
        chosen = jnp.argsort(best_first, axis=-1) < recent_slots(self.large, view.limit)[..., None]
        pool = in_text_order(lambda x: pooled(x, self.kernel), jnp.where(candidates, attention, 0.0), position)
        uniform = uniform_at(new.seed, new.layer, position, self._ranking(new), new.head)[:, :, 0]
        noise = gumbel(uniform.astype(wide(new.k.dtype)))
        scores = jnp.log(jnp.maximum(pool, jnp.finfo(pool.dtype).tiny)) + noise
        highest = float(jnp.finfo(scores.dtype).max) / 4
        return new.spread.own_slots(jnp.where(candidates & ~chosen, scores, highest))

    def _size(self, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        keys, values = view.keys(new), view.values(new).astype(wide(new.k.dtype))
        if self.by == "range":
            return coarse(values.max(-1) - values.min(-1))
        norms = [(projected(x, COLUMNS, new, self._ranking(new)) ** 2).sum(-1) for x in (keys, values)]
        return coarse(norms[0] * norms[1])

    def _ranking(self, new: LayerTokens) -> Int[Array, "b 1"]:
        return (new.newest // self.evict_every)[:, None]
