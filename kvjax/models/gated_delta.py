"""The gated delta rule as a layer's mixer: a convolution, a state that tokens correct, and a gated norm."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from kvjax.cache.layer import MixerInput
from kvjax.cache.recurrent import Recurrent
from kvjax.models.config import ModelConfig
from kvjax.models.delta_rule import DeltaTokens, read_token, read_tokens
from kvjax.models.linear import Linear, Norm, product
from kvjax.types import ALONE
from pallas_kernels.attention import wide

EPS = 1e-6
"""Constant added to the squared length of queries and keys."""


@struct.dataclass
class GatedDelta:
    r"""Weights of Gated DeltaNet (Yang et al. 2025, arXiv:2412.06464, figure 1 and equation 10).

    Queries, keys and values run through a depthwise causal convolution with SiLU, and queries and keys are divided by
    their length. The values are written by :math:`\beta_t`, the sigmoid of a projection, and the state decays by
    :math:`g_t = -e^a \, \mathrm{softplus}(w x_t + b)` (`log_rate`, `decay` and `decay_bias`). Outputs are normalized,
    multiplied by the SiLU of a gate, and projected.
    """

    query: Linear
    key: Linear
    value: Linear
    gate: Linear
    output: Linear
    beta: Float[Array, "n width"]
    decay: Float[Array, "n width"]
    decay_bias: Float[Array, " n"]
    log_rate: Float[Array, " n"]
    query_taps: Float[Array, "f w"]
    key_taps: Float[Array, "f w"]
    value_taps: Float[Array, "f w"]
    norm: Norm
    key_width: int = struct.field(pytree_node=False, default=0)
    """Size of one query or key."""

    cache_kind: ClassVar[type[Recurrent]] = Recurrent

    @property
    def heads(self) -> tuple[int, int]:
        """Number of key heads of this device, and of value heads for each of them."""
        key_heads = len(self.query_taps) // self.key_width
        return key_heads, len(self.log_rate) // key_heads

    def init_cache(self, tokens: MixerInput, limit: Int[Array, "b h"], slots: int) -> Recurrent:
        """Return a cache that has read nothing; it has no slots, whatever their limit."""
        dtype, (h, r), taps = tokens.hidden.dtype, self.heads, self.query_taps.shape[1]
        value_width = len(self.value_taps) // len(self.log_rate)
        features = (2 * len(self.query_taps) + len(self.value_taps)) // h
        return Recurrent(
            columns=jnp.zeros((len(limit), taps - 1, h, features), dtype),
            state=jnp.zeros((len(limit), h, r, self.key_width, value_width), wide(dtype)),
        )

    def __call__(
        self, x: Float[Array, "b t width"], config: ModelConfig, cache: Any, tokens: MixerInput
    ) -> tuple[Float[Array, "b t width"], Any]:
        """Run tokens through the layer; padding neither writes nor lets the state decay.

        Args:
            x: input of the layer, normalized.
            cache: layer cache with the methods `convolve` and `advance`, as `Recurrent` has them.
            tokens: the tokens of `x`.

        Returns:
            Outputs, and the cache afterwards.
        """
        spread, rule = tokens.shape.spread, config.delta_rule
        assert rule is not None and self.norm.scale is not None
        x = jnp.where(tokens.reading.valid[..., None], x, 0)
        operands, cache = self._operands(x, config, cache, tokens)
        read = read_token if x.shape[1] == 1 else read_tokens
        out, state, writes = read(operands, cache.state)
        cache = cache.advance(state, writes)
        out = out * jax.lax.rsqrt(jnp.mean(out**2, -1, keepdims=True) + rule.norm_eps)
        out = out.astype(x.dtype) * self.norm.scale
        out = jnp.moveaxis(out, 3, 1).reshape(*x.shape[:2], -1)
        gate = jax.nn.silu(self.gate(x).astype(cache.state.dtype))
        out = (out.astype(gate.dtype) * gate).astype(x.dtype)
        if spread == ALONE:
            return self.output(out), cache
        return self.output.over(spread.over_attention, spread.own_features(out)), cache

    def _operands(self, x: Array, config: ModelConfig, cache: Any, tokens: MixerInput) -> tuple[DeltaTokens, Any]:
        (h, r), (b, t, _), dtype = self.heads, x.shape, cache.state.dtype
        assert config.delta_rule is not None

        def by_head(*parts: Array) -> Array:
            # The features of each key head side by side, of which devices share the heads.
            return jnp.concatenate([part.reshape(*part.shape[:-1], h, -1) for part in parts], axis=-1)

        inputs = by_head(self.query(x), self.key(x), self.value(x))
        taps = by_head(self.query_taps.T, self.key_taps.T, self.value_taps.T)
        mixed, cache = cache.convolve(inputs, jnp.moveaxis(taps, 0, -1), tokens.reading)
        mixed, d = jnp.moveaxis(jax.nn.silu(mixed), 2, 1), self.key_width
        q, k, v = jnp.split(mixed, [d, 2 * d], axis=-1)
        v = jnp.moveaxis(v.reshape(b, h, t, r, -1), 3, 2)
        beta = config.delta_rule.write_scale * jax.nn.sigmoid(product(x, self.beta).astype(dtype))
        steps = jax.nn.softplus(product(x, self.decay).astype(dtype) + self.decay_bias.astype(dtype))
        decay = -jnp.exp(self.log_rate.astype(dtype)) * steps
        valid = tokens.reading.valid[..., None]
        beta, decay = (jnp.moveaxis(jnp.where(valid, each, 0).reshape(b, t, h, r), 1, 3) for each in (beta, decay))
        return DeltaTokens(_unit(q) * d**-0.5, _unit(k), v, beta, decay), cache


def _unit(x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    return x * jax.lax.rsqrt((x**2).sum(-1, keepdims=True) + EPS)
