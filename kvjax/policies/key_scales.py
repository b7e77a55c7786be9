"""What channels of keys are divided by before they become codes of a few bits."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.attention import wide


def channel_factors(keys: Float[Array, "b h t d"], valid: Bool[Array, "b #h t"]) -> Float[Array, "b h d"]:
    """Powers of two by which the channels of keys are to be divided so that none outweighs the others.

    Keys of real models have channels many times as large as the rest; a scale for each slot would leave the others no
    digits. A query times the factor meets the key divided by it: powers of two do so without rounding.
    """
    wider = keys.astype(wide(keys.dtype))
    squares = jnp.where(valid[..., None], wider * wider, 0.0).sum(2)
    mean = squares / jnp.maximum(valid.sum(-1), 1)[..., None]
    # A channel that is silent in the prompt may speak later: it gets no factor below a thousandth of the loudest.
    floor = jnp.maximum(mean.max(-1, keepdims=True) * 1e-6, jnp.finfo(mean.dtype).tiny)
    exponent = jnp.round(jnp.log2(jnp.maximum(mean, floor)) / 2)
    return jnp.exp2(exponent)
