"""Rotary position embedding: its settings, and the rotation of queries and keys."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.operands import turn

STRETCH = 4096
"""Positions whose angles are computed as one product; those of models' usual texts are within the first."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al., 2021) and its context extensions.

    Args:
        width: number of leading head dimensions that are rotated, at most the head width.
        theta: base of the geometric series of wavelengths.
        interleaved: rotate pairs (0, 1), (2, 3), ... (GPT-J) instead of (0, w/2), (1, w/2+1), ...
        scaling: `none`, `linear` (all positions divided by `factor`) or `llama3` (long wavelengths only).
        factor: how much longer the context is than the original one.
        low_freq_factor: `llama3` only, wavelengths above original/low are divided by `factor`.
        high_freq_factor: `llama3` only, wavelengths below original/high are left alone.
        original_max_positions: `llama3` only, context length before the extension, in tokens.
    """

    width: int
    theta: float = 10_000.0
    interleaved: bool = False
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        if self.width % 2:
            raise ValueError(f"RoPE turns pairs of dimensions, so its width must be even, not {self.width}.")
        if self.scaling == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"llama3 RoPE needs low_freq_factor below high_freq_factor, not {self.low_freq_factor} "
                f"and {self.high_freq_factor}."
            )


def rope_frequencies(rope: Rope) -> Float[np.ndarray, " half"]:
    """Radians per position of each rotated pair, after `linear` or `llama3` scaling, in float64."""
    frequencies = rope.theta ** (-np.arange(0, rope.width, 2) / rope.width)
    if rope.scaling == "linear":
        frequencies = frequencies / rope.factor
    elif rope.scaling == "llama3":
        wavelengths = 2 * math.pi / frequencies
        smooth = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        smooth = np.clip(smooth, 0.0, 1.0)
        frequencies = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    return frequencies


def rotate(rope: Rope | None, x: Float[Array, "*b t d"], positions: Int[Array, "*#b t"]) -> Float[Array, "*b t d"]:
    """Rotate queries or keys by their positions; the identity for models without RoPE."""
    if rope is None:
        return x
    return turn(x, *_angles(rope, positions, x.dtype), rope.interleaved)


def table(rope: Rope, places: int, dtype: DTypeLike) -> tuple[Float[Array, "m half"], Float[Array, "m half"]]:
    """Cosines and sines of the angles of the first places, as constants of a program.

    XLA would otherwise fuse the sines into whatever reads them and compute them anew for every slot.
    """
    with jax.ensure_compile_time_eval():
        return _angles(rope, jnp.arange(places), dtype)


def _angles(
    rope: Rope, positions: Int[Array, "*b"], dtype: DTypeLike
) -> tuple[Float[Array, "*b half"], Float[Array, "*b half"]]:
    """Cosines and sines of what each pair of channels is turned by, in at least float32."""
    # The product itself would lose an angle's last digits to its full turns, far out in a text.
    kind = jnp.promote_types(dtype, jnp.float32)
    frequencies = rope_frequencies(rope)
    per_stretch = np.remainder(STRETCH * frequencies, 2 * math.pi).astype(kind)
    stretch, place = jnp.divmod(positions[..., None], STRETCH)
    angles = stretch * per_stretch + place * frequencies.astype(kind)
    return jnp.cos(angles), jnp.sin(angles)
