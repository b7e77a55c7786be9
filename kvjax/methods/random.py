"""Random eviction, as a control for other methods."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.methods.register import register_score
from kvjax.policies.score import Score
from kvjax.types import LayerTokens, PyTree, View
from pallas_kernels.noise import uniform_at


@register_score("random", paper="control", group="ranked by keys, values or chance, without attention")
class Random(Score):
    r"""Random priority of each token, drawn once, so that a head always holds a uniformly random subset of the text.

    .. math:: F(i) = u_i, \quad u_i \sim U(0, 1)

    When: as a control. With sinks and the recent half protected, perplexity is 17.0 at a quarter of the slots, and 14.9
    under `h2o` (SmolLM2 on WikiText-2).
    """

    def init_slot(self, new: LayerTokens, state: PyTree) -> Float[Array, "b h t"]:
        """Return one priority per layer, head and token."""
        position = jnp.broadcast_to(new.position[:, None], new.k.shape[:3])
        return uniform_at(new.seed, new.layer, position, head=new.head)

    def score(self, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        return view.slots.score
