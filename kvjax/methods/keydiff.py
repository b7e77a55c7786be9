"""KeyDiff (Park et al. 2025, equation 5): keys that differ most from the other keys."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.methods.register import register_score
from kvjax.policies.score import Requirements, Score
from kvjax.types import LayerTokens, View, at_least, setting, wide


@register_score("keydiff", paper="KeyDiff, eq. 5", group="ranked by keys, values or chance, without attention")
class KeyDifference(Score):
    r"""Keys that differ most from the mean direction of all cached keys.

    .. math:: F(i) = -\cos(k_i, \mu), \quad \mu = \frac 1 n \sum_j \frac{k_j}{\lVert k_j \rVert}

    over the n cached tokens of the head. It needs no attention probabilities and stores nothing besides keys and
    values.

    When: if attention probabilities are not available, or prompts are read in blocks. It has not been measured on many
    models yet.

    Args:
        block: number of prompt tokens read between two evictions; None for the whole prompt.
    """

    block: int | None = setting(128, at_least(1, "a number of tokens"))

    @property
    def requires(self) -> Requirements:
        return Requirements(prompt_chunk=self.block, whole_heads=True)

    def score(self, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        keys = view.keys(new).astype(wide(new.k.dtype))
        length = jnp.linalg.norm(keys, axis=-1)
        # Keys of unit length would be an array of the cache's size, which a GPU would write and read.
        inverse = jnp.where(view.live & (length > 0), 1 / length, 0.0)
        total = new.spread.over_slots(jnp.einsum("bhcd,bhc->bhd", keys, inverse))
        mean = total / jnp.linalg.norm(total, axis=-1, keepdims=True)
        return -jnp.einsum("bhcd,bhd->bhc", keys, mean) * inverse
