"""Kernels (feature maps) of LESS: two small MLPs per layer whose inner product approximates exp(q k / sqrt(d))."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Key

from kvjax.models.config import ModelConfig
from kvjax.types import wide
from pallas_kernels.noise import mix

_Drop = Callable[[Array], Array] | None

Params = Any
"""Parameters of both modules, {"phi": ..., "psi": ...}; a leading axis L if they are stacked over layers."""

WARM_START = 1e-4
"""Initial value of the learned scalars: training starts from the sparse policy alone (section 3.2)."""


class Phi(nn.Module):
    r"""Features of queries, one MLP per query head (equation 1).

    .. math:: \phi(q) = |\sigma(\sigma(q W_1) W_2)|, \quad \sigma = \text{GELU}

    Args:
        features: R.
        hidden: R'.
        dropout: rate before the first activation, in training.
    """

    features: int = 8
    hidden: int = 512
    dropout: float = 0.3

    @nn.compact
    def __call__(self, q: Float[Array, "b h g t d"], *, train: bool = False) -> Float[Array, "b h g t R"]:
        h, g, d = q.shape[1], q.shape[2], q.shape[-1]
        first = self.param("first", _xavier(2), (h, g, d, self.hidden))
        second = self.param("second", _xavier(2), (h, g, self.hidden, self.features))
        return jnp.abs(_mlp(q, first, second, _dropper(self) if train else None))


class Psi(nn.Module):
    r"""Features of keys, one MLP per KV head.

    .. math:: k_2 = |s_1| \, \sigma(\sigma(k W_1) W_2), \qquad \psi(k) = |k_2 + s_2 \, k_2 W_3|

    with learned scalars s per head and feature (section 3.2). With `literal`, psi is equation 2 as printed, with the
    first of these scalars: :math:`\psi(k) = |k_2 W_3|`.

    Args:
        features, hidden, dropout: as in `Phi`.
        literal: the third layer without the residual connection and its scalar.
    """

    features: int = 8
    hidden: int = 512
    dropout: float = 0.3
    literal: bool = False

    @nn.compact
    def __call__(self, k: Float[Array, "b h t d"], *, train: bool = False) -> Float[Array, "b h t R"]:
        h, d = k.shape[1], k.shape[-1]
        first = self.param("first", _xavier(1), (h, d, self.hidden))
        second = self.param("second", _xavier(1), (h, self.hidden, self.features))
        third = self.param("third", _xavier(1), (h, self.features, self.features))
        warm = nn.initializers.constant(WARM_START, jnp.float32)
        outer_scale = self.param("outer_scale", warm, (h, self.features))
        outer = jnp.abs(outer_scale)[:, None] * _mlp(k, first, second, _dropper(self) if train else None)
        mixed = jnp.einsum("bhtr,hrf->bhtf", outer, third)
        if self.literal:
            return jnp.abs(mixed)
        residual_scale = self.param("residual_scale", warm, (h, self.features))
        return jnp.abs(outer + residual_scale[:, None] * mixed)


class Performer(nn.Module):
    r"""Positive random features: untrained, unbiased kernels (Choromanski et al. 2021, lemma 1).

    .. math:: f(x) = R^{-1/2} \exp(w_r \cdot x' - \lVert x' \rVert^2 / 2), \quad x' = x / d^{1/4}

    so that the mean of f(q) f(k) over w ~ N(0, 1) is exp(q k / sqrt(d)). The w_r of a KV head are orthogonal. Its keys
    and queries share them.

    Args:
        features: R, at most the head width.
    """

    features: int = 8

    @nn.compact
    def __call__(self, x: Float[Array, "b h *g t d"], *, train: bool = False) -> Float[Array, "b h *g t R"]:
        d = x.shape[-1]
        planes = self.param("planes", _orthogonal_gaussians, (x.shape[1], self.features, d))
        planes = planes.reshape(x.shape[1], *(1,) * (x.ndim - 4), self.features, d)
        x = x.astype(wide(x.dtype)) / d**0.25
        projected = jnp.einsum("...td,...rd->...tr", x, planes)
        return jnp.exp(projected - 0.5 * jnp.sum(x**2, -1, keepdims=True)) / math.sqrt(self.features)


def init_kernels(
    key: Key[Array, ""], config: ModelConfig, *, features: int = 8, hidden: int = 512, literal: bool = False
) -> Params:
    """Initialize kernels of all layers, stacked: weights [L, h, g, ...] of phi and [L, h, ...] of psi, float32."""
    q, k = _examples(config)
    phi, psi = Phi(features, hidden), Psi(features, hidden, literal=literal)

    def init(key: Key[Array, ""]) -> Params:
        of_phi, of_psi = jax.random.split(key)
        return {"phi": phi.init(of_phi, q)["params"], "psi": psi.init(of_psi, k)["params"]}

    return jax.vmap(init)(jax.random.split(key, config.layers))


def performer_kernels(key: Key[Array, ""], config: ModelConfig, *, features: int = 8) -> Params:
    """Draw random features for all layers, stacked as in `init_kernels`.

    Raises:
        ValueError: `features` exceeds the head width.
    """
    if features > config.head_width:
        raise ValueError(f"features={features} are not orthogonal in heads of width {config.head_width}; use fewer.")
    kernel, k = Performer(features), _examples(config)[1]
    stacked = jax.vmap(lambda key: kernel.init(key, k)["params"])(jax.random.split(key, config.layers))
    return {"phi": stacked, "psi": stacked}


def unstack(params: Params) -> tuple[Params, ...]:
    """Split kernels into a tuple of layers: from a stack, each compiled step would copy every layer out."""
    if not isinstance(params, Mapping):
        return tuple(params)
    layers = jax.tree.leaves(params)[0].shape[0]
    return tuple(jax.tree.map(lambda leaf, layer=layer: leaf[layer], params) for layer in range(layers))


def _mlp(
    x: Float[Array, "b *h t d"], first: Float[Array, "*h d hidden"], second: Float[Array, "*h hidden R"], drop: _Drop
) -> Float[Array, "b *h t R"]:
    # Heads are one batch axis and the tokens of all rows another: XLA runs other layouts at half the speed.
    x = jnp.moveaxis(x.astype(wide(x.dtype)), 0, -3)
    *heads, b, t, d = x.shape
    flat = math.prod(heads)
    inner = jnp.einsum("hnd,hdr->hnr", x.reshape(flat, b * t, d), first.reshape(flat, *first.shape[-2:]))
    inner = _gelu(inner if drop is None else drop(inner))
    outer = _gelu(jnp.einsum("hnr,hrf->hnf", inner, second.reshape(flat, *second.shape[-2:])))
    return jnp.moveaxis(outer.reshape(*heads, b, t, second.shape[-1]), -3, 0)


def _dropper(kernel: Phi | Psi) -> _Drop:
    # Dropout by a hash of the index, which XLA fuses with the activation: `nn.Dropout` took longer than all the rest.
    if kernel.dropout == 0:
        return None
    seed = jax.random.bits(kernel.make_rng("dropout"), (), jnp.uint32)

    def drop(x: Array) -> Array:
        index = jax.lax.iota(jnp.uint32, x.size).reshape(x.shape)
        mask = mix(index + seed) >= jnp.uint32(kernel.dropout * 2**32)
        return jnp.where(mask, x / (1 - kernel.dropout), 0.0)

    return drop


def _examples(config: ModelConfig) -> tuple[Array, Array]:
    k = jnp.zeros((1, config.kv_heads, 1, config.head_width), jnp.float32)
    return jnp.broadcast_to(k[:, :, None], (1, config.kv_heads, config.groups, 1, config.head_width)), k


def _xavier(batch_axes: int) -> Any:
    return nn.initializers.xavier_uniform(batch_axis=tuple(range(batch_axes)), dtype=jnp.float32)


def _gelu(x: Array) -> Array:
    return nn.gelu(x, approximate=False)


def _orthogonal_gaussians(key: Key[Array, ""], shape: tuple[int, int, int]) -> Array:
    h, features, d = shape
    directions, lengths = jax.random.split(key)
    rows = nn.initializers.orthogonal(dtype=jnp.float32)
    units = jax.vmap(lambda key: rows(key, (features, d)))(jax.random.split(directions, h))
    # Directions are orthogonal; lengths are distributed as for independent Gaussians.
    norms = jnp.linalg.norm(jax.random.normal(lengths, (h, features, d), jnp.float32), axis=-1, keepdims=True)
    return units * norms
