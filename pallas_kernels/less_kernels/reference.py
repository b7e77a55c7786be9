"""Phi and psi of LESS (equations 1 and 2) in plain XLA, and a decode step with its memory (equations 3 to 5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import LowRank, Partial, merge, share_of_evicted


class Remembered(NamedTuple):
    """Memory that includes the evicted pairs, and attention that includes the memory."""

    h: Float[Array, "b h R e"]
    """Sum of psi(k)^T v."""
    z: Float[Array, "b h R"]
    """Sum of psi(k)."""
    out: Float[Array, "b h g e"]
    """Attention in the queries' dtype."""


def phi(x: Float[Array, "m t d"], first: Float[Array, "m d r"], second: Float[Array, "m r f"]) -> Float[Array, "m t f"]:
    """Compute equation 1 for m query heads."""
    return jnp.abs(_two_layers(x, first, second))


def psi(
    x: Float[Array, "m t d"],
    first: Float[Array, "m d r"],
    second: Float[Array, "m r f"],
    third: Float[Array, "m f f"],
    outer_scale: Float[Array, "m f"],
    residual_scale: Float[Array, "m f"] | None,
) -> Float[Array, "m t f"]:
    """Compute equation 2 for m KV heads, with the scalars of section 3.2; as printed if `residual_scale` is None."""
    outer = jnp.abs(outer_scale)[:, None] * _two_layers(x, first, second)
    mixed = jnp.einsum("mtf,mfe->mte", outer, third)
    return jnp.abs(mixed if residual_scale is None else outer + residual_scale[:, None] * mixed)


def _two_layers(x: Array, first: Array, second: Array) -> Array:
    inner = jnp.einsum("mtd,mdr->mtr", x.astype(jnp.promote_types(x.dtype, jnp.float32)), first)
    return _gelu(jnp.einsum("mtr,mrf->mtf", _gelu(inner), second))


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def remember(
    memory: tuple[Float[Array, "b h R e"], Float[Array, "b h R"]],
    evicted: tuple[Float[Array, "b h d"], Float[Array, "b h e"], Int[Array, "b h"]],
    q: Float[Array, "b h g d"],
    attended: Partial,
    of_phi: Callable[[Float[Array, "b h g d"]], Float[Array, "b h g R"]],
    of_psi: Callable[[Float[Array, "b h d"]], Float[Array, "b h R"]],
) -> Remembered:
    """See `api.remember`; `of_phi` and `of_psi` are functions here."""
    h, z = memory
    k, v, position = evicted
    features = jnp.where(position[..., None] >= 0, of_psi(k), 0.0)
    h, z = h + jnp.einsum("bhr,bhe->bhre", features, v.astype(h.dtype)), z + features
    share = share_of_evicted(LowRank(of_phi(q)[:, :, :, None], h, z))
    whole = merge(jax.tree.map(lambda x: x[:, :, :, None], attended), share)
    return Remembered(h, z, whole.out[:, :, :, 0].astype(q.dtype))
