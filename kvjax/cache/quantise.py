"""Numbers of keys and values in 8 or 4 bits, with one scale for each slot."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.attention import wide
from pallas_kernels.operands import Quantised

LEVELS = {8: 127, 4: 7}
"""The largest code of so many bits; the smallest is its negative."""


def quantise(x: Float[Array, "*b c d"], bits: int) -> Quantised:
    r"""Codes of each slot's numbers, symmetric about zero.

    .. math:: s = \max_i |x_i| / L, \quad code_i = \mathrm{round}(x_i / s), \quad L = 127 \text{ or } 7

    Args:
        x: numbers, d of each slot; d is even for 4 bits.
        bits: 8, or 4, which lie in pairs in a byte: the first half of the channels low, the second high.
    """
    x = x.astype(wide(x.dtype))
    scale = jnp.maximum(jnp.abs(x).max(-1), jnp.finfo(jnp.float32).tiny) / LEVELS[bits]
    codes = jnp.round(x / scale[..., None]).astype(jnp.int8)
    if bits == 4:
        low, high = jnp.split((codes + 8).astype(jnp.uint8), 2, axis=-1)
        codes = low | (high << 4)
    return Quantised(codes, scale)


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
