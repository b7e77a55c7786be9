"""SnapKV and PyramidKV: what the end of the prompt looks at, pooled over neighbours."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax.lax import reduce_window

from kvjax.plan import Pyramid
from kvjax.policies.base import Policy, check
from kvjax.types import Weighing, setting, wide


@struct.dataclass(kw_only=True)
class SnapKV(Policy):
    r"""Attention of the last prompt queries, pooled over neighbours.

    .. math:: F(i) = \mathrm{pool}_{|j - i| \le 3} \sum_{t = n - w}^{n - 1} \bar a_t(j)

    with the attention of a KV head's query heads pooled, too. The window always stays. Only the prompt is scored:
    generated tokens that leave the window score 0 and go first, the oldest before the others. With `prefill_chunk` the
    windows at the ends of the chunks add up before they are pooled; a prompt read token by token is not pooled at all.

    Args:
        recent: the observation window w, in tokens (or a share of the budget).
        kernel: neighbours pooled together, an odd number.
        pooling: `average` or `max` over neighbours.
        group: `mean` or `max` over the query heads of a KV head.
    """

    needs_probs = True
    pages = True
    paper = "SnapKV, Li et al. 2024, Listing 1"

    recent: int | float = setting(32)
    kernel: int = setting(7)
    pooling: str = setting("average")
    group: str = setting("mean")

    def __post_init__(self):
        super().__post_init__()
        odd = isinstance(self.kernel, int) and self.kernel > 0 and self.kernel % 2 == 1
        check(odd, "kernel", self.kernel, "an odd number from 1")
        check(self.pooling in ("average", "max"), "pooling", self.pooling, "'average' or 'max'")
        check(self.group in ("mean", "max"), "group", self.group, "'mean' or 'max'")

    def stats(self, new, state):
        """What the window's queries saw, and the same pooled over neighbours: nothing yet."""
        nothing = jnp.zeros(new.k.shape[:3], wide(new.k.dtype))
        return nothing, nothing

    def observe(self, cache, probs, new):
        """Add up the attention of the prompt's last w queries."""
        last = self._in_window(cache, new)
        window_sum = functools.partial(_window_sum, probs, last, self.group)
        nothing = functools.partial(jnp.zeros_like, cache.stats[0])
        # Most of a prompt's queries are in no window: only the blocks that are cost anything.
        added = jax.lax.cond(last.any(), window_sum, nothing) if probs.shape[3] > 1 else window_sum()
        return cache.replace(stats=(cache.stats[0] + added, cache.stats[1] + added))

    def weighing(self, cache, new):
        """The last w queries count; a maximum over query heads is no sum."""
        return Weighing(self._in_window(cache, new).astype(cache.stats[0].dtype)) if self.group == "mean" else None

    def summed(self, cache, sums, new):
        """The attention of the last w queries."""
        added = sums.mean(2)
        return cache.replace(stats=(cache.stats[0] + added, cache.stats[1] + added))

    def _in_window(self, cache, new):
        window = self.recent_slots(cache.limit)[..., None]
        last = (new.position >= 0) & (new.position < new.prompt_length[:, None])
        return last[:, None] & (new.position[:, None] >= new.read[:, None, None] - window)

    def commit(self, cache, new):
        """Pool the scores of the tokens before the window over neighbours in position order."""
        window = self.recent_slots(cache.limit)[..., None]
        before = (cache.position >= 0) & (cache.position < new.read[:, None, None] - window)
        scores = jnp.where(before, cache.stats[0], 0.0)
        live = jnp.where(cache.position < 0, jnp.iinfo(jnp.int32).max, cache.position)
        order = jnp.argsort(live, axis=-1)
        scores = jnp.take_along_axis(scores, order, axis=-1)
        half = self.kernel // 2
        sizes, strides, pads = (1, 1, self.kernel), (1, 1, 1), ((0, 0), (0, 0), (half, half))
        if self.pooling == "average":
            zero = jnp.zeros((), scores.dtype)
            scores = reduce_window(scores, zero, jnp.add, sizes, strides, pads) / self.kernel
        else:
            lowest = jnp.array(-jnp.inf, scores.dtype)
            scores = reduce_window(scores, lowest, jnp.maximum, sizes, strides, pads)
        scores = jnp.take_along_axis(scores, jnp.argsort(order, axis=-1), axis=-1)
        # Window tokens are not scored: one that leaves the window later counts as a generated token does.
        return cache.replace(stats=(cache.stats[0], jnp.where(before, scores, 0.0)))

    def score(self, cache, new):
        """Score = F."""
        return cache.stats[1]


def _window_sum(probs, window, group):
    pooled = probs.mean(2) if group == "mean" else probs.max(2)
    return jnp.einsum("bhtc,bht->bhc", pooled, window.astype(probs.dtype))


@struct.dataclass(kw_only=True)
class PyramidKV(SnapKV):
    """SnapKV with budgets that fall from the first layer to the last.

    Args:
        beta: the last layer gets 1/beta of the average budget beyond the window.
    """

    paper = "PyramidKV, Cai et al. 2024, section 3.2"

    beta: float = setting(20.0)

    def default_plan(self):
        """Pyramid over a window that every layer holds."""
        return Pyramid(self.beta, self.recent if isinstance(self.recent, int) else 0)
