"""Output weights of attention, for scores by what a value adds to a layer's output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxtyping import Array, Float

from kvjax.types import wide

if TYPE_CHECKING:
    from kvjax.models.model import LanguageModel


def output_weights(model: LanguageModel) -> tuple[Float[Array, "h g e width"], ...]:
    """Return the output weights of each layer, split by query head."""
    found = []
    for layer, config in zip(model.weights.layers, model.config.layer_configs, strict=True):
        weight = layer.output.matrix.astype(wide(model.weights.dtype))
        found.append(weight.T.reshape(config.kv_heads, config.groups, config.value_width, -1))
    return tuple(found)
