"""Output weights of attention, for scores by what a value adds to a layer's output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.models.model import LanguageModel
from kvjax.models.weights import is_shape
from kvjax.types import LayerConfig, wide


def output_weights(model: LanguageModel, change: Callable[[Array], Array] = lambda x: x) -> tuple[Array, ...]:
    """Return the output weights [h g e width] of each layer after a `change`; shapes, if the model has only these.

    A layer without slots of its own has those of no head.
    """
    dtype, matrices = wide(model.weights.dtype), []
    for layer, config in zip(model.weights.layers, model.config.layer_configs, strict=True):

        def of_heads(mixer: Any, config: LayerConfig = config) -> Array:
            if not config.stores:
                return change(jnp.zeros((0, config.groups, config.value_width, config.width), dtype))
            return change(mixer.output_by_head(config).astype(dtype))

        shapes = is_shape(model.weights.table.weight)
        matrices.append(jax.eval_shape(of_heads, layer.mixer) if shapes else of_heads(layer.mixer))
    return tuple(matrices)
