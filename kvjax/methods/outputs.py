"""Output weights of attention, for scores by what a value adds to a layer's output."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
from jaxtyping import Array

from kvjax.models.linear import Linear
from kvjax.models.model import LanguageModel
from kvjax.models.weights import is_shape
from kvjax.types import wide


def output_weights(model: LanguageModel, change: Callable[[Array], Array] = lambda x: x) -> tuple[Array, ...]:
    """Return the output weights [h g e width] of each layer after a `change`; shapes, if the model has only these.

    A layer without attention has those of no head.
    """
    dtype, matrices = wide(model.weights.dtype), []
    for layer, config in zip(model.weights.layers, model.config.layer_configs, strict=True):
        heads = config.kv_heads, config.groups, config.value_width, config.width

        def split(output: Linear, heads: tuple[int, ...] = heads) -> Array:
            return change(output.matrix.astype(dtype)[:, : math.prod(heads[:-1])].T.reshape(heads))

        output = layer.mixer.output
        matrices.append(jax.eval_shape(split, output) if is_shape(output.weight) else split(output))
    return tuple(matrices)
