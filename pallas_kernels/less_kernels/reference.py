"""Phi and psi of LESS in plain XLA, for one head per leading index."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def phi(x: Float[Array, "m t d"], first: Float[Array, "m d r"], second: Float[Array, "m r f"]) -> Float[Array, "m t f"]:
    """Equation 1 for m query heads."""
    return jnp.abs(_two_layers(x, first, second))


def psi(
    x: Float[Array, "m t d"],
    first: Float[Array, "m d r"],
    second: Float[Array, "m r f"],
    third: Float[Array, "m f f"],
    outer_scale: Float[Array, "m f"],
    residual_scale: Float[Array, "m f"] | None,
) -> Float[Array, "m t f"]:
    """Equation 2 for m KV heads, with the scalars of section 3.2; as it is printed without `residual_scale`."""
    outer = jnp.abs(outer_scale)[:, None] * _two_layers(x, first, second)
    mixed = jnp.einsum("mtf,mfe->mte", outer, third)
    return jnp.abs(mixed if residual_scale is None else outer + residual_scale[:, None] * mixed)


def _two_layers(x: Array, first: Array, second: Array) -> Array:
    inner = jnp.einsum("mtd,mdr->mtr", x.astype(jnp.promote_types(x.dtype, jnp.float32)), first)
    return _gelu(jnp.einsum("mtr,mrf->mtf", _gelu(inner), second))


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)
