"""DropKV: tokens whose eviction would change the outputs of recent queries most."""

from __future__ import annotations

from jaxtyping import Array, Float

from kvjax.methods.register import register_score
from kvjax.methods.step_windows import begin, ended, shifted, weights
from kvjax.policies import Damage, Score
from kvjax.types import Heads, LayerTokens, View, at_least, nothing, setting

Windows = tuple[Float[Array, "b h c"], Float[Array, "b h c"]]


@register_score("dropkv", paper="DropKV", group="ranked by attention at every token", recent=32)
class DropDamage(Score):
    r"""Tokens whose eviction would change the outputs of recent queries most.

    .. math:: F(i) = \sum_{t} \sum_g \left( \frac{p_{gt}(i)}{1 - p_{gt}(i)} \right)^2 \lVert v_i - o_{gt} \rVert^2

    over the queries t of two windows: the one of w queries that is being filled, and the one before. When a token needs
    a slot, these are the last w + 1 to 2w queries. It is a distance in the space of values, so scores of different
    heads are comparable.

    The authors' code has one window, the last 8 queries of a prompt. It averages their scores over 11 neighboring
    tokens, and evicts nothing afterwards. Here two windows replace it because F is summed as queries arrive and also
    evicts while the model writes; F is not averaged over neighbors.

    When: with the plan `adakv`, because its scores are comparable between heads. It has not been measured on many
    models yet.

    Args:
        window: w, in queries.
    """

    window: int = setting(32, at_least(1, "a number of queries"))

    def init_slot(self, new: LayerTokens, state: object) -> Windows:
        """Return zeros, the initial damage to the queries of the previous and of the current window."""
        return nothing(new), nothing(new)

    def attention_stats(self, heads: Heads, new: LayerTokens) -> Damage | tuple[Damage, ...]:
        """Request the damage to the new token's output, or in a block the damage to the outputs of both windows."""
        if new.position.shape[1] == 1:
            return Damage()
        since, position = begin(new, self.window)[:, None], new.position
        windows = (position >= since - self.window) & (position < since), position >= since
        return tuple(Damage(weights(queries, new)) for queries in windows)

    def update_slot(self, stats: Array | tuple[Array, Array], view: View, new: LayerTokens) -> Windows:
        """Return both sums with the new queries' damage added; a completed window replaces the previous one."""
        before, current = shifted(view.slots.score, ended(new, self.window))
        added = stats if isinstance(stats, tuple) else (0.0, stats)
        return before + added[0], current + added[1]

    def score(self, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        return view.slots.score[0] + view.slots.score[1]
