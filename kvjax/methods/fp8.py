"""8-bit floating-point numbers (e4m3), the storage format of FP8 key-value caches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, UInt8

from kvjax.methods.register import register_part
from kvjax.policies.quantizer import Quantizer, channel_factors

LARGEST = float(jnp.finfo(jnp.float8_e4m3fn).max)
"""Largest number of the format, 448; it has no infinities."""


@register_part("fp8")
class Float8(Quantizer):
    r"""8-bit floating-point numbers (e4m3) without a scale per slot.

    .. math:: \hat x_i = \mathrm{e4m3}(\min(\max(x_i, -448), 448))

    Numbers have four bits of exponent and three of mantissa, and are rounded to the nearest, ties to even. Keys are
    first divided by a power of two per channel, as in `int8`. XLA decodes one block of slots at a time; no kernel
    reads this format.

    From: FP8 Formats for Deep Learning, arXiv 2209.05433, section 3.

    When: if a slot has to take exactly one byte per number. Otherwise use `int8`, which rounds less and is read by
    kernels: `h2o` with half of the slots has a perplexity of 13.30 in 13.2% of the full cache's bytes, and of 13.25 in
    14.0% with `int8` (SmolLM2 in float32 on WikiText-2).
    """

    def init_scales(self, keys: Float[Array, "b h t d"], valid: Bool[Array, "b 1 t"]) -> Float[Array, "b h d"]:
        """Return powers of two that bring all channels to a similar size."""
        return channel_factors(keys, valid)

    def encode(self, x: Float[Array, "*b c d"]) -> UInt8[Array, "*b c d"]:
        # As bytes, because gathers and collectives of 8-bit floats are not available on every platform.
        rounded = jnp.clip(x, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn)
        return jax.lax.bitcast_convert_type(rounded, jnp.uint8)

    def decode(self, stored: UInt8[Array, "*b c d"], dtype: DTypeLike) -> Float[Array, "*b c d"]:
        """Return the encoded values, which every dtype of a model represents exactly."""
        return jax.lax.bitcast_convert_type(stored, jnp.float8_e4m3fn).astype(dtype)
