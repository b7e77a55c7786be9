"""TOVA: the token that the newest query needs least."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool

from kvjax.policies.base import Policy
from kvjax.types import NewTokens, Weighing, setting, wide


@struct.dataclass(kw_only=True)
class Tova(Policy):
    r"""Last attention, one score for all heads of a layer.

    .. math:: F_t(i) = \frac{1}{H} \sum_{h} a_{t,h}(i)

    Args:
        recent: newest tokens that stay; only the newest in the paper.
    """

    needs_probs = True
    paper = "TOVA, Oren et al. 2024, section 4"

    recent: int | float = setting(1)

    def stats(self, new, state):
        """Attention of the last query, none yet."""
        return jnp.zeros(new.k.shape[:3], wide(new.k.dtype))

    def observe(self, cache, probs, new):
        """F_t = mean over all query heads of a_t; of a prompt only the last query counts."""
        newest = _newest(new)
        return self._with_last(cache, jnp.einsum("bhgtc,bt->bhgc", probs, newest.astype(probs.dtype)), newest)

    def weighing(self, cache, new):
        """Only the last query counts."""
        return Weighing(weights=_newest(new)[:, None].astype(cache.stats.dtype))

    def summed(self, cache, sums, new):
        """F_t of the prompt's last query."""
        return self._with_last(cache, sums, _newest(new))

    def _with_last(self, cache, attention, newest):
        # Heads of a layer always agree, so slot c is the same token in all of them.
        last = attention.mean((1, 2))[:, None]
        return cache.replace(stats=jnp.where(newest.any(1)[:, None, None], last, cache.stats))

    def score(self, cache, new):
        """Score = F_t."""
        return cache.stats


def _newest(new: NewTokens) -> Bool[Array, "b t"]:
    return new.valid & (new.position == new.newest[:, None])
