"""Loss of the training: squared error of the attention with LESS, after the output projection."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from kvjax.methods.less.feature_maps import Params, Phi, Psi
from kvjax.methods.outputs import output_weights
from kvjax.model import Model
from kvjax.training.less.recipe import Recipe
from kvjax.training.less.record import Features

CHUNK = 128
"""Steps per chunk of linear attention; evictions of earlier chunks are added as one sum."""

Projection = Float[Array, "w h g d"]
"""Output projection of one layer, by heads."""

Projections = Float[Array, "L w h g d"]
"""Output projections of all layers, by heads."""


def memory_attention(
    params: Params, recipe: Recipe, features: Features, dropout: Key[Array, ""] | None = None
) -> Float[Array, "b h g n d"]:
    """Compute equation 3, the attention with LESS, for all positions in parallel.

    The memory at a position contains all pairs evicted up to that step. This is causal linear attention, in chunks.

    Args:
        dropout: random key in training; None for no dropout.
    """
    shape = {"features": recipe.features, "hidden": recipe.hidden, "dropout": recipe.dropout}
    train = dropout is not None
    rngs = [{"dropout": key} for key in jax.random.split(dropout)] if train else [{}, {}]
    phi: Any = Phi(**shape).apply({"params": params["phi"]}, features.q, train=train, rngs=rngs[0])
    of_keys = Psi(**shape, literal=recipe.literal)
    psi: Any = of_keys.apply({"params": params["psi"]}, features.k, train=train, rngs=rngs[1])
    n, d = features.v.shape[-2:]
    phi, psi = _chunks(phi), _chunks(psi * features.leaving[..., None])
    pairs = _chunks(jnp.concatenate([features.v, jnp.ones_like(features.v[..., :1])], -1))  # the ones sum psi
    sums = jnp.einsum("bhmsr,bhmsd->bhmrd", psi, pairs)
    before = jnp.cumsum(sums, axis=2) - sums
    size = phi.shape[-2]
    within = jnp.einsum("bhgmtr,bhmsr->bhgmts", phi, psi) * jnp.tril(jnp.ones((size, size), phi.dtype))
    mass = jnp.einsum("bhgmts,bhmsd->bhgmtd", within, pairs) + jnp.einsum("bhgmtr,bhmrd->bhgmtd", phi, before)
    mass = mass.reshape(*mass.shape[:3], -1, d + 1)[..., :n, :]
    # Both parts are relative to the cache's; the limit keeps float32 finite if the cache's mass is tiny.
    mass = mass * jnp.exp(jnp.minimum(-features.lse, 80.0))[..., None]
    return (features.sparse + mass[..., :d]) / (1 + mass[..., d:])


def _chunks(x: Array) -> Array:
    n = x.shape[-2]
    size = min(CHUNK, n)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -n % size), (0, 0)])
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])


def squared_error(
    out: Float[Array, "b h g n d"], features: Features, projection: Projection
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Return the summed squared error after the output projection, and the number of terms.

    Positions before the first eviction do not count.
    """
    off = jnp.einsum("bhgnd,whgd->bnw", out - features.full, projection)
    counts = jnp.cumsum(features.leaving.max(1), axis=-1) > 0
    return jnp.sum(jnp.where(counts[..., None], off, 0.0) ** 2), counts.sum() * off.shape[-1]


def output_projections(model: Model) -> Projections:
    """Return W_o of all layers, by heads."""
    return jnp.moveaxis(jnp.stack(output_weights(model)), -1, 1)
