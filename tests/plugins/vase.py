"""VaSE: tokens whose values vary most, and a random draw of the others in proportion to their attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax.lax import reduce_window
from jaxtyping import Array, Float, Int, UInt32

import kvjax
from kvjax.types import Heads, New, View, check, is_share, nothing, number, setting, wide


@struct.dataclass
class ValueSpread(kvjax.Score):
    r"""The largest values' ranges, then tokens drawn without replacement in proportion to pooled attention.

    .. math::
        F(i) = \begin{cases}
            \infty & i \text{ among the } n_{large} \text{ of the rest with the largest } \max_c v_{ic} - \min_c v_{ic}
            \\ \log \mathrm{pool}_{|j - i| \le 2} \sum_{t > n - r} \sum_g a_{t,g}(j) + \zeta_i & \text{else}
        \end{cases}

    The rest are all tokens but the r newest, which stay (`kvjax.Protection(recent=r)`). The zeta are independent Gumbel
    variables, drawn anew for each ranking, so that the highest sums are a draw without replacement; a factor of the
    attention changes nothing. Attention is pooled over neighbors among the rest. The last r queries t are those since
    the last ranking; after given text, the last r of its own.

    Args:
        every: r, tokens from one ranking to the next, as in `kvjax.Policy`.
        large: n_large, as a number of slots or as a fraction of a head's.
        sinks: first tokens, whose range counts as infinite.
        kernel: neighbors pooled together, an odd number.
    """

    paper = "VaSE, arXiv 2606.03928"

    every: int = setting(64)
    large: int | float = number(0.5)
    sinks: int = setting(4)
    kernel: int = setting(5)

    def __post_init__(self) -> None:
        check(self.every >= 1, "every", self.every, "a number of tokens from 1")
        check(self.kernel % 2 == 1, "kernel", self.kernel, "an odd number from 1")

    @property
    def requires(self) -> kvjax.Requirements:
        """Whole heads in one buffer: `score` would see pages one by one, without the neighbors on others."""
        return kvjax.Requirements(whole_heads=True)

    def slot(self, new: New, state: object) -> tuple[Float[Array, "b h t"], Float[Array, "b h t"]]:
        """Return zeros: attention of the last r queries, and of those since the last multiple of r."""
        return nothing(new), nothing(new)

    def _since(self, new: New) -> Int[Array, " b"]:
        # The last position before which tokens were evicted.
        return new.newest // self.every * self.every

    def asks(self, heads: Heads, new: New) -> kvjax.Sums | tuple[kvjax.Sums, ...]:
        """Return a request for the attention of a token, or of given text for both of its sums."""
        if not new.given:
            return kvjax.Sums()
        last = new.position > (new.newest - self.every)[:, None]
        after = new.position >= self._since(new)[:, None]
        kind = wide(new.q.dtype)
        return tuple(kvjax.Sums((queries & new.valid)[:, None].astype(kind)) for queries in (last, after))

    def fold(
        self, answers: Array | tuple[Array, Array], view: View, new: New
    ) -> tuple[Float[Array, "b h c"], Float[Array, "b h c"]]:
        """Return both sums with the new queries' attention added."""
        goes_on = new.position[:, 0] > self._since(new)
        before = jnp.where(goes_on[:, None, None], view.slots.score[1], 0.0)
        if isinstance(answers, tuple):
            return answers[0], before + answers[1]
        return before + answers, before + answers

    def score(self, view: View, new: New) -> Float[Array, "b h c"]:
        """Return F where tokens are evicted; between two evictions each head has an empty slot, and ranks nothing."""
        due = jnp.asarray(new.given) | (new.newest % self.every == 0).any()
        zeros = jnp.zeros(view.position.shape, wide(new.k.dtype))
        return jax.lax.cond(due, lambda: self._ranked(view, new).astype(zeros.dtype), lambda: zeros)

    def _ranked(self, view: View, new: New) -> Float[Array, "b h c"]:
        values = view.values(new).astype(wide(new.k.dtype))
        spread = jnp.where(view.position < self.sinks, jnp.inf, values.max(-1) - values.min(-1))
        position, spread, attention = map(new.spread.all_slots, (view.position, spread, view.slots.score[0]))
        rest = (position >= 0) & (position <= (new.newest - self.every)[:, None, None])
        best_first = jnp.argsort(jnp.where(rest, -spread, jnp.inf), axis=-1)
        large = self.large * view.limit + 1e-6 if is_share(self.large) else jnp.full_like(view.limit, self.large)
        chosen = jnp.argsort(best_first, axis=-1) < jnp.floor(large)[..., None]
        pooled = self._pooled(jnp.where(rest, attention, 0.0), position)
        drawn = jnp.log(jnp.maximum(pooled, jnp.finfo(pooled.dtype).tiny)) + self._gumbel(position, new)
        highest = float(jnp.finfo(drawn.dtype).max) / 4
        return new.spread.own_slots(jnp.where(rest & ~chosen, drawn, highest))

    def _pooled(self, x: Float[Array, "b h c"], position: Int[Array, "b h c"]) -> Float[Array, "b h c"]:
        order = jnp.argsort(jnp.where(position >= 0, position, jnp.iinfo(jnp.int32).max), axis=-1)
        half = self.kernel // 2
        window, pads = (1, 1, self.kernel), ((0, 0), (0, 0), (half, half))
        in_order = jnp.take_along_axis(x, order, axis=-1)
        total = reduce_window(in_order, jnp.zeros((), x.dtype), jnp.add, window, (1, 1, 1), pads)
        return jnp.take_along_axis(total, jnp.argsort(order, axis=-1), axis=-1) / self.kernel

    def _gumbel(self, position: Int[Array, "b h c"], new: New) -> Float[Array, "b h c"]:
        head = jnp.broadcast_to(jnp.arange(position.shape[1]), position.shape[:2]) if new.head is None else new.head
        ranking = new.newest // self.every
        return gumbel(new.seed[:, None, None], new.layer, head[..., None], ranking[:, None, None], position)


@jnp.vectorize
def gumbel(
    seed: UInt32[Array, ""], layer: Int[Array, ""], head: Int[Array, ""], ranking: Int[Array, ""], at: Int[Array, ""]
) -> Float[Array, ""]:
    """Return the Gumbel variable of a row's seed, a layer, a head, a ranking and a position."""
    key = jax.random.key(seed)
    for each in (layer, head, ranking, at):
        key = jax.random.fold_in(key, each)
    return jax.random.gumbel(key, dtype=jnp.float32)


def vase(*, every: int = 64, large: int | float = 0.5, sinks: int = 4, kernel: int = 5) -> kvjax.Policy:
    """Return the policy VaSE.

    Args:
        every: tokens from one ranking to the next, of which the newest stay.
        large: tokens kept for their values, as a number of slots or as a fraction of a head's.
        sinks: first tokens, which count as those with the largest values.
        kernel: neighbors whose attention is pooled, an odd number.
    """
    score = ValueSpread(every, large, sinks, kernel)
    return kvjax.Policy(score, kvjax.Protection(recent=every), evict_every=every)
