"""KeyDiff: the token whose key is most like the other keys leaves first."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

import kvjax
from kvjax.types import New, View, check, setting, wide


@struct.dataclass
class KeyDiff(kvjax.Score):
    r"""Cosine similarity of a key to the mean direction of all cached keys.

    .. math:: F(i) = -\cos(k_i, \mu), \quad \mu = \frac 1 n \sum_j \frac{k_j}{\lVert k_j \rVert}

    over the n tokens that the head holds. It needs no attention, and nothing is stored beside keys and values.

    Args:
        block: prompt tokens that are read between two evictions; None for the whole prompt.
    """

    paper = "KeyDiff, Park et al. 2025, arXiv 2504.15364, equation 5"

    block: int | None = setting(128)

    def __post_init__(self) -> None:
        check(self.block is None or self.block >= 1, "block", self.block, "a number of tokens from 1, or None")

    @property
    def requires(self) -> kvjax.Requirements:
        """Whole heads in one buffer: `score` would see pages one by one, each with a mean of its own."""
        return kvjax.Requirements(prompt_chunk=self.block, shared_slots="heads")

    def score(self, view: View, new: New) -> Float[Array, "b h c"]:
        """Return F."""
        keys = view.keys(new).astype(wide(new.k.dtype))
        unit = keys / jnp.linalg.norm(keys, axis=-1, keepdims=True)
        total = new.spread.over_slots(jnp.where(view.live[..., None], unit, 0.0).sum(2))
        mean = total / jnp.linalg.norm(total, axis=-1, keepdims=True)
        return -jnp.einsum("bhcd,bhd->bhc", unit, mean)


def keydiff(*, block: int | None = 128, sinks: int = 0, recent: int | float = 0) -> kvjax.Policy:
    """Return the policy KeyDiff.

    Args:
        block: prompt tokens that are read between two evictions; None for the whole prompt.
        sinks: first tokens of the text that are never evicted.
        recent: newest tokens that are never evicted.
    """
    return kvjax.Policy(KeyDiff(block), kvjax.Protection(sinks, recent))
