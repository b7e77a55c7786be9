"""Quantizers: storage formats of keys and values."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from kvjax.policies.base import Part
from kvjax.types import PyTree, wide
from pallas_kernels import operands
from pallas_kernels.operands import Quantised

LEAST_TOKENS = 8
"""Tokens of a text from which scales can be estimated: fewer keys show too little of each channel."""


class Quantizer(Part, interface=True):
    """Storage format of keys and values: encodes and decodes the keys or values of slots.

    Slots and heads are encoded independently, and keys in the same way as values. Attention reads the stored form one
    block of slots at a time. Settings are static (`kvjax.types.setting`). `@register_part("NAME")` names a subclass.

    Example:
        >>> import jax.numpy as jnp
        >>> class Half(kvjax.Quantizer):
        ...     def encode(self, x):
        ...         return x.astype(jnp.float16)
        ...
        ...     def decode(self, stored, dtype):
        ...         return stored.astype(dtype)
        >>> kvjax.policy("h2o", codec=Half()).codec
        Codec(positions='original', quantizer=Half(), sliding=False, sinks=0)
    """

    def init_scales(self, keys: Float[Array, "b h t d"], valid: Bool[Array, "b 1 t"]) -> Float[Array, "b h d"] | None:
        """Return a scale for each key channel, or None for no scales; keys are divided by them before `encode`.

        Queries are multiplied by the scales, which therefore have to be powers of two: these do not round.

        Args:
            keys: keys of the first text, from which the scales are estimated; after a text of fewer than 8 tokens all
                scales are 1.
            valid: mask of its tokens; the others are padding.
        """
        return None

    @abc.abstractmethod
    def encode(self, x: Float[Array, "*b c d"]) -> PyTree:
        """Return the stored form of keys or values: a tree of arrays [... c ...].

        Kernels read a `pallas_kernels.operands.Quantised`. XLA decodes every other form.
        """

    @abc.abstractmethod
    def decode(self, stored: PyTree, dtype: DTypeLike) -> Float[Array, "*b c d"]:
        """Return the decoded keys or values [... c d] of a stored form, in a dtype."""


class Plain(Quantizer):
    r"""Keys and values in the model's own dtype.

    .. math:: \hat k_i = k_i, \quad \hat v_i = v_i

    From: no paper; the reference for the other formats.

    When: if 8-bit codes are not supported, as with `positions="cache"` under most scores; otherwise use `int8`.
    """

    def encode(self, x: Float[Array, "*b c d"]) -> Float[Array, "*b c d"]:
        return x

    def decode(self, stored: Float[Array, "*b c d"], dtype: DTypeLike) -> Float[Array, "*b c d"]:
        return stored.astype(dtype)


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


class SymmetricQuantizer(Quantizer):
    """Integer codes with one scale per slot, rounded symmetrically about zero. Kernels can encode them, too."""

    bits: ClassVar[int]
    """Bits of a code, 8 or 4."""

    def init_scales(self, keys: Float[Array, "b h t d"], valid: Bool[Array, "b 1 t"]) -> Float[Array, "b h d"]:
        return channel_factors(keys, valid)

    def encode(self, x: Float[Array, "*b c d"]) -> Quantised:
        return operands.quantise(x, self.bits)

    def decode(self, stored: Quantised, dtype: DTypeLike) -> Float[Array, "*b c d"]:
        return stored.values(dtype)


class Int8(SymmetricQuantizer):
    r"""8-bit codes with one scale for each key and each value.

    .. math:: \hat x_i = s \, \mathrm{round}(x_i / s), \quad s = \max_i |x_i| / 127

    Each key channel is first divided by a factor, and queries are multiplied by it. The factor is a power of two,
    estimated from the prompt, or 1 if the prompt has fewer than 8 tokens. Attention reads the codes directly.

    From: symmetric rounding, not from a paper.

    When: before using fewer slots. It loses nothing measurable, at 28% of the bytes of float32 slots and about 55% of
    16-bit ones (SmolLM2; `h2o` with half of the slots has a perplexity of 13.25, and of 13.22 in floats).
    """

    bits: ClassVar[int] = 8


class Int4(SymmetricQuantizer):
    r"""4-bit codes, two to a byte, with one scale for each key and each value.

    .. math:: \hat x_i = s \, \mathrm{round}(x_i / s), \quad s = \max_i |x_i| / 7

    Everything else is as in `int8`.

    From: symmetric rounding, not from a paper.

    When: rarely. It loses more than fewer slots would: a perplexity of 16.7 in 8% of the full cache's bytes, where
    8-bit codes with a quarter of the slots reach 14.9 in 7% (SmolLM2 on WikiText-2).
    """

    bits: ClassVar[int] = 4

    def bind(self, model: Any) -> Self:
        """Refuse a model with keys or values of odd width, whose codes cannot be packed in pairs."""
        for index, layer in enumerate(model.config.layer_configs):
            for name, width in (("keys", layer.key_width), ("values", layer.value_width)):
                if width % 2:
                    raise ValueError(
                        f"codec int4 packs numbers in pairs, but {name} of layer {index} have {width}; use int8."
                    )
        return self


CODECS: dict[str, type[Quantizer]] = {"plain": Plain, "int8": Int8, "int4": Int4}
"""Quantizers by name; the key positions of a codec are a setting of the policy."""
