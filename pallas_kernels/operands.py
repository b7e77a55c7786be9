"""Keys and values other than arrays: codes, other stored forms, or keys that are rotated when they are read."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from pallas_kernels.attention import static, wide


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantised:
    """Numbers stored as codes of 8 or 4 bits with one scale per slot: x = scale * code.

    Args:
        codes: int8 [... c d]; or uint8 [... c d/2], where the low four bits hold the first half of the channels and
            the high four bits the second, each as code + 8.
        scale: scale of each slot, float32 (float64 for float64).
    """

    codes: Int[Array, "*b c w"]
    scale: Float[Array, "*b c"]

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 if self.codes.dtype == jnp.int8 else 4

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded numbers."""
        *lead, w = self.codes.shape
        return (*lead, w if self.bits == 8 else 2 * w)

    def values(self, dtype: Any) -> Float[Array, "*b c d"]:
        """Return the decoded array; code that reads a cache decodes one block at a time."""
        return unpack_codes(self.codes).astype(dtype) * self.scale[..., None].astype(dtype)


LEVELS = {8: 127, 4: 7}
"""Largest code for a number of bits; the smallest is its negative."""


def quantise(x: Float[Array, "*b c d"], bits: int) -> Quantised:
    r"""Quantize each slot's numbers, symmetric about zero.

    .. math:: s = \max_i |x_i| / L, \quad code_i = \mathrm{round}(x_i / s), \quad L = 127 \text{ or } 7

    Args:
        x: numbers, d of each slot; d is even for 4 bits.
        bits: 8, or 4 with two codes in a byte: the first half of the channels low, the second high.
    """
    levels, scale = codes_and_scale(x.astype(wide(x.dtype)), bits)
    codes = levels.astype(jnp.int8)
    if bits == 4:
        low, high = jnp.split((codes + 8).astype(jnp.uint8), 2, axis=-1)
        codes = low | (high << 4)
    return Quantised(codes, scale[..., 0])


def codes_and_scale(x: Float[Array, "*b d"], bits: int) -> tuple[Float[Array, "*b d"], Float[Array, "*b 1"]]:
    """Return codes as whole numbers and their scale; kernels run these lines, too."""
    scale = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), jnp.finfo(jnp.float32).tiny) / LEVELS[bits]
    return jnp.round(x / scale), scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Encoded:
    """Keys or values in a custom storage format. Only `xla` takes them: it decodes one block of slots at a time."""

    stored: Any
    decoder: Any = dataclasses.field(metadata={"static": True})
    """Hashable object; its `decode(stored, dtype)` returns the array [... c d] of a tree of arrays [... c ...]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded numbers."""
        return jax.eval_shape(lambda stored: self.decoder.decode(stored, jnp.float32), self.stored).shape

    def values(self, dtype: Any) -> Float[Array, "*b c d"]:
        """Return the decoded array."""
        return self.decoder.decode(self.stored, dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LazyRope:
    """Unrotated keys that attention rotates (RoPE) by their rank in the cache.

    Args:
        keys: [... c d].
        order: rank of each slot, from 0; arbitrary in empty slots.
        cos, sin: cosines and sines of the angles of each rank [places, w/2]; the first w channels are rotated.
        interleaved: rotates pairs (0, 1), (2, 3), ... instead of (0, w/2), (1, w/2 + 1), ...
    """

    keys: Float[Array, "*b c d"]
    order: Int[Array, "*b c"]
    cos: Float[Array, "m half"]
    sin: Float[Array, "m half"]
    interleaved: bool = static(False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the keys."""
        return self.keys.shape

    def values(self, dtype: Any) -> Float[Array, "*b c d"]:
        """Return the rotated keys."""
        place = jnp.clip(self.order, 0, self.cos.shape[0] - 1)
        cos, sin = whole_widths(self.cos[place], self.sin[place], self.interleaved)
        return turn(self.keys, cos, sin, self.interleaved).astype(dtype)


Operand = Array | Quantised | Encoded | LazyRope
"""Keys or values [... c d] of attention."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitKV:
    """Keys or values in two arrays: the slots of `old`, then those of `new`; blocks are read without joining them."""

    old: Operand
    new: Operand

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of both together."""
        b, h, c, d = self.old.shape
        return b, h, c + self.new.shape[2], d

    def values(self, dtype: Any) -> Float[Array, "b h c d"]:
        """Return both decoded, in one array."""
        return jnp.concatenate([values(self.old, dtype), values(self.new, dtype)], axis=2)


def unpack_codes(codes: Integer[Array, "*b c w"]) -> Int[Array, "*b c d"]:
    """Return codes as int8, one for each channel."""
    if codes.dtype == jnp.int8:
        return codes
    low, high = codes & 15, codes >> 4
    return (jnp.concatenate([low, high], axis=-1).astype(jnp.int8)) - jnp.int8(8)


def values(operand: Operand | SplitKV, dtype: Any) -> Float[Array, "*b c d"]:
    """Return an operand decoded to an array; code that reads a cache passes one block at a time."""
    return operand.astype(dtype) if isinstance(operand, jax.Array) else operand.values(dtype)


def cut(operand: Operand, at: Any, size: int, axis: int) -> Operand:
    """Return `size` of an operand's slots (or pages) along `axis`, from `at` on."""

    def part(leaf: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(leaf, at, size, axis)

    if isinstance(operand, LazyRope):
        return dataclasses.replace(operand, keys=part(operand.keys), order=part(operand.order))
    return jax.tree.map(part, operand)


def whole_widths(
    cos: Float[Array, "*b half"], sin: Float[Array, "*b half"], interleaved: bool
) -> tuple[Float[Array, "*b w"], Float[Array, "*b w"]]:
    """Expand cosines and sines of pairs to the factors with which `turn` multiplies each channel and its partner."""
    if interleaved:
        cos, sin = jnp.repeat(cos, 2, axis=-1), jnp.stack([-sin, sin], axis=-1).reshape(*sin.shape[:-1], -1)
        return cos, sin
    return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)


def turn(
    x: Float[Array, "*b d"], cos: Float[Array, "*#b w"], sin: Float[Array, "*#b w"], interleaved: bool
) -> Float[Array, "*b d"]:
    """Rotate the first channels in pairs, with factors from `whole_widths`; `interleaved` is as in `LazyRope`."""
    width = cos.shape[-1]
    pairs, unrotated = x[..., :width], x[..., width:]
    swapped = jax.lax.platform_dependent(
        pairs,
        tpu=functools.partial(swap_by_product, interleaved),
        default=functools.partial(swap_halves, interleaved),
    )
    rotated = pairs.astype(cos.dtype) * cos + swapped.astype(cos.dtype) * sin
    return jnp.concatenate([rotated, unrotated.astype(cos.dtype)], axis=-1).astype(x.dtype)


def swap_halves(interleaved: bool, x: Float[Array, "*b w"]) -> Float[Array, "*b w"]:
    """Swap the two channels of each pair."""
    if interleaved:
        return jnp.stack([x[..., 1::2], x[..., 0::2]], axis=-1).reshape(x.shape)
    return jnp.roll(x, x.shape[-1] // 2, axis=-1)


def swap_by_product(interleaved: bool, x: Float[Array, "*b w"]) -> Float[Array, "*b w"]:
    """Swap the channels of each pair by a product with a permutation."""
    # Equally exact, and XLA fuses it with its neighbours; it would pad and copy halves of 64 lanes.
    channels = np.arange(x.shape[-1])
    places = channels ^ 1 if interleaved else np.roll(channels, len(channels) // 2)
    swap = jnp.asarray(np.eye(len(channels))[places], x.dtype)
    return jnp.einsum("...i,oi->...o", x, swap, precision=jax.lax.Precision.HIGHEST)
