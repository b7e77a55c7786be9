"""Scales of key channels, applied before keys are quantized."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.attention import wide

LEAST_TOKENS = 8
"""Tokens of a text from which scales can be estimated: fewer keys show too little of each channel."""


def channel_factors(keys: Float[Array, "b h t d"], valid: Bool[Array, "b #h t"]) -> Float[Array, "b h d"]:
    """Return powers of two that bring the channels of keys to a similar size when divided by them.

    Some key channels of real models are many times larger than the rest. With one scale per slot, the other channels
    would round to zero. Queries are multiplied by the same factors, and powers of two do not round.
    """
    wider = keys.astype(wide(keys.dtype))
    squares = jnp.where(valid[..., None], wider * wider, 0.0).sum(2)
    mean = squares / jnp.maximum(valid.sum(-1), 1)[..., None]
    # A channel near zero in the prompt may grow later: its factor is at least a thousandth of the largest channel's.
    floor = jnp.maximum(mean.max(-1, keepdims=True) * 1e-6, jnp.finfo(mean.dtype).tiny)
    exponent = jnp.round(jnp.log2(jnp.maximum(mean, floor)) / 2)
    return jnp.exp2(exponent)
