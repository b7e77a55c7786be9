"""Multi-head latent attention as a layer's mixer (DeepSeek-V2, 2024, section 2.1), whose cache keeps latents alone."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from kvjax.cache.host import new_slots
from kvjax.cache.layer import MixerInput
from kvjax.cache.slots import Slots
from kvjax.models.config import ModelConfig
from kvjax.models.linear import Linear, Norm, normalise
from kvjax.types import LayerConfig


@struct.dataclass
class LatentAttention:
    r"""Weights of multi-head latent attention; the first two are None in models that project queries at once.

    A slot holds a token's rotated key and its latent, :math:`[k^R; c]`, for all heads. Queries absorb the up-projection
    of keys and attention's outputs that of values, so that neither is ever computed:

    .. math:: \tilde q_h = [q^R_h;\, U_h^\top q_h], \quad o_h = V_h \sum_i p_{hi} c_i
    """

    query_down: Linear | None
    query_norm: Norm | None
    query: Linear
    """Maps to the plain and the rotated elements of each head's query."""
    latent: Linear
    """Maps to the latent, and behind it to the key that all heads share."""
    latent_norm: Norm
    key_up: Linear
    """U, [heads, key width, latent width]."""
    value_up: Linear
    """V, [heads, value width, latent width]."""
    output: Linear

    cache_kind: ClassVar[type[Slots]] = Slots

    def init_cache(self, tokens: MixerInput, limit: Int[Array, "b h"], slots: int) -> Slots:
        """Return a cache of empty slots, see `kvjax.models.decoder.Mixer`."""
        return new_slots(tokens, limit, slots)

    def __call__(
        self, x: Float[Array, "b t width"], config: ModelConfig, cache: Any, tokens: MixerInput
    ) -> tuple[Float[Array, "b t width"], Any]:
        """Project tokens to queries and latents, attend to the layer's cache of latents, and project back."""
        assert config.latent is not None
        slot = self.slots(x, config)
        attended, cache = cache.attend(tokens, self.queries(x, config), slot, slot, None)
        latents = attended[:, 0, :, :, config.latent.rotated :].astype(x.dtype)
        values = jnp.einsum("bhtc,hvc->bthv", latents, self.value_up.matrix.astype(x.dtype))
        return self.output(values.reshape(*x.shape[:2], -1)), cache

    def queries(self, x: Float[Array, "b t width"], config: ModelConfig) -> Float[Array, "b 1 g t d"]:
        """Return queries that have absorbed U, before RoPE; rotated elements come first."""
        assert config.latent is not None
        inner = x if self.query_down is None else _normalise(self.query_norm, self.query_down(x), config)
        q = self.query(inner).reshape(*x.shape[:2], config.heads, -1)
        plain, rotated = jnp.split(q, [config.latent.key_width], axis=-1)
        absorbed = jnp.einsum("bthk,hkc->bthc", plain, self.key_up.matrix.astype(x.dtype))
        return jnp.concatenate([rotated, absorbed], axis=-1).transpose(0, 2, 1, 3)[:, None]

    def slots(self, x: Float[Array, "b t width"], config: ModelConfig) -> Float[Array, "b 1 t d"]:
        """Return what slots keep of the tokens, before RoPE: the shared key and the latent."""
        assert config.latent is not None
        latent, shared_key = jnp.split(self.latent(x), [config.latent.width], axis=-1)
        return jnp.concatenate([shared_key, _normalise(self.latent_norm, latent, config)], axis=-1)[:, None]

    def output_by_head(self, shape: LayerConfig) -> Float[Array, "h g e width"]:
        """Return the map from attention to slots to the layer's output, for each query head."""
        up = self.value_up.matrix
        output = self.output.matrix.T.reshape(*up.shape[:2], -1)
        of_latents = jnp.einsum("hvc,hvw->hcw", up, output.astype(up.dtype))
        rotated = shape.value_width - up.shape[-1]  # elements of slots that no output reads
        return jnp.pad(of_latents, ((0, 0), (rotated, 0), (0, 0)))[None]


def _normalise(norm: Norm | None, x: Float[Array, "*b width"], config: ModelConfig) -> Float[Array, "*b width"]:
    assert config.latent is not None
    return normalise(norm, x, dataclasses.replace(config, norm_eps=config.latent.norm_eps))
