"""L2 (Devoto et al. 2024, arXiv 2406.11430, section 3): the key of the largest norm is evicted first."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from kvjax.methods.register import register_score
from kvjax.policies.rankings import OldestFirst, Ranking, coarse
from kvjax.policies.score import Score
from kvjax.types import New, PyTree, View, check, derived, setting, wide

if TYPE_CHECKING:
    from kvjax.models.model import LanguageModel


@register_score("l2", paper="Devoto et al. 2024", group="ranked by keys, values or chance, without attention")
@struct.dataclass
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

    skip_layers: int = setting(0)
    skipped: bool = derived(False)
    """True in a skipped layer; set by `layer`."""

    def __post_init__(self) -> None:
        whole = isinstance(self.skip_layers, int) and self.skip_layers >= 0
        check(whole, "skip_layers", self.skip_layers, "a whole number from 0")

    def bind(self, model: LanguageModel) -> KeyNorm:
        """Return the score unchanged, after a check that the model has at least `skip_layers` layers."""
        layers = model.config.layers
        check(self.skip_layers <= layers, "skip_layers", self.skip_layers, f"a number of the model's {layers} layers")
        return self

    def layer(self, index: int) -> KeyNorm:
        """Return the score of a layer, which ranks by age if the layer is skipped."""
        return dataclasses.replace(self, skipped=index < self.skip_layers)

    def slot(self, new: New, state: PyTree) -> Float[Array, "b h t"]:
        """Return the norm of the key."""
        return coarse(jnp.linalg.norm(new.k.astype(wide(new.k.dtype)), axis=-1))

    def score(self, view: View, new: New) -> Ranking:
        """Return the negated norm; skipped layers rank by age."""
        return OldestFirst() if self.skipped else -view.slots.score
