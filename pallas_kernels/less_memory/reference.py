"""Phi and psi of LESS (equations 1 and 2) in plain XLA, and a decode step with its memory (equations 3 to 5)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention import LowRank, merge, share_of_evicted
from pallas_kernels.less_memory import api
from pallas_kernels.less_memory.api import KeyFeatures, QueryFeatures, Remember, Remembered
from pallas_kernels.op import Options


def phi(x: QueryFeatures, _: Options) -> Float[Array, "m t f"]:
    """Compute equation 1 for m query heads."""
    return jnp.abs(_two_layers(x.x, *x.layers))


def psi(x: KeyFeatures, _: Options) -> Float[Array, "m t f"]:
    """Compute equation 2 for m KV heads, with the scalars of section 3.2; as printed if there is no residual scale."""
    first, second, third, outer_scale, residual_scale = x.layers
    outer = jnp.abs(outer_scale)[:, None] * _two_layers(x.x, first, second)
    mixed = jnp.einsum("mtf,mfe->mte", outer, third)
    return jnp.abs(mixed if residual_scale is None else outer + residual_scale[:, None] * mixed)


def _two_layers(x: Array, first: Array, second: Array) -> Array:
    inner = jnp.einsum("mtd,mdr->mtr", x.astype(jnp.promote_types(x.dtype, jnp.float32)), first)
    return _gelu(jnp.einsum("mtr,mrf->mtf", _gelu(inner), second))


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def less_remember(x: Remember, options: Options) -> Remembered:
    (h, z), (k, v, position), how = x.memory, x.evicted, options._asdict()
    features = api.psi(k[:, :, None], **x.of_psi, **how)[:, :, 0]
    features = jnp.where(position[..., None] >= 0, features, 0.0)
    h, z = h + jnp.einsum("bhr,bhe->bhre", features, v.astype(h.dtype)), z + features
    share = share_of_evicted(LowRank(api.phi(x.q[:, :, :, None], **x.of_phi, **how), h, z))
    merged = merge(jax.tree.map(lambda y: y[:, :, :, None], x.attended), share)
    return Remembered(h, z, merged.out[:, :, :, 0].astype(x.q.dtype))
