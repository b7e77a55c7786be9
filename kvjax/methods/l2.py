"""L2 (Devoto et al. 2024, arXiv 2406.11430, section 3): the key of the largest norm is evicted first."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.methods.register import register_score
from kvjax.models.model import LanguageModel
from kvjax.policies import OldestFirst, Ranking, Score, coarse
from kvjax.types import LayerTokens, PyTree, View, at_least, check, derived, setting, wide


@register_score("l2", paper="Devoto et al. 2024", group="ranked by keys, values or chance, without attention")
class KeyNorm(Score):
    r"""Keys of small norms: the largest is evicted first; rotary embeddings do not change norms.

    .. math:: F(i) = -\lVert k_i \rVert_2

    When: as a control. Without protection it evicts recent tokens: perplexity is 140 at a quarter of the slots, and
    17.3 with `sinks=4 recent=0.5`, where `random` has 17.0 (SmolLM2 on WikiText-2).

    Args:
        skip_layers: number of first layers that keep their most recent tokens instead; 2 in the paper's language
            modeling. Every layer still keeps its budget. To leave the first layers uncompressed, as in the paper, give
            `prefill` a list of budgets with the length of the text for these layers.
    """

    skip_layers: int = setting(0, at_least(0, "a whole number"))
    skipped: bool = derived(False)
    """True in a skipped layer; set by `layer`."""

    def bind(self, model: LanguageModel) -> KeyNorm:
        """Return the score unchanged, after a check that the model has at least `skip_layers` layers."""
        layers = model.config.layers
        check(self.skip_layers <= layers, "skip_layers", self.skip_layers, f"a number of the model's {layers} layers")
        return self

    def layer(self, index: int) -> KeyNorm:
        return self.replace(skipped=index < self.skip_layers)

    def init_slot(self, new: LayerTokens, state: PyTree) -> Float[Array, "b h t"]:
        return coarse(jnp.linalg.norm(new.k.astype(wide(new.k.dtype)), axis=-1))

    def score(self, view: View, new: LayerTokens) -> Ranking:
        return OldestFirst() if self.skipped else -view.slots.score
