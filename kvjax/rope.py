"""Rotary position embedding: its settings, and the rotation of queries and keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.op import How, options_of, or_xla
from pallas_kernels.operands import turn, whole_widths
from pallas_kernels.rope import rope as rotate_token

STRETCH = 4096
"""Positions per stretch, whose angles are one product; most texts fit into the first stretch."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al., 2021) and its context extensions, with the formulas of transformers.

    The frequencies of `dynamic` and `longrope` depend on the length of a text. Cached keys cannot be rotated again:
    a row uses the frequencies of its planned length (prompt + `max_new_tokens`, or `rope_length` of `kvjax.prefill`)
    from its first token on. Without a cache, it uses those of its actual length. A text that fits the original context
    thus has the logits of transformers. If a text crosses its end, transformers changes the frequencies of later tokens
    (for Phi-3, it reads the whole text again), and vLLM uses the long factors for all texts if it serves longer ones.

    Args:
        width: number of leading head dimensions that are rotated, at most the head width.
        theta: base of the geometric series of wavelengths.
        interleaved: rotate pairs (0, 1), (2, 3), ... (GPT-J) instead of (0, w/2), (1, w/2+1), ...
        scaling: `none`; `linear`: all positions divided by `factor`; `dynamic`: theta grows with a text beyond
            `original_max_positions` (NTK); `yarn`: frequencies of long wavelengths divided by `factor`, by a ramp
            (Peng et al., 2023); `llama3`: the same with another ramp; `longrope`: each wavelength multiplied by its
            own factor (Ding et al., 2024); `proportional`: all divided by `factor`, and only the `fraction` of the
            pairs with the shortest wavelengths is rotated (Gemma 4).
        factor: ratio of the extended context length to the original one.
        low_freq_factor: `llama3` only, frequencies of wavelengths above original/low are divided by `factor`. If it is
            `high_freq_factor`, there is a step instead of a ramp (Llama 4).
        high_freq_factor: `llama3` only, wavelengths below original/high are unchanged.
        original_max_positions: context length before the extension, in tokens.
        beta_fast: `yarn` only, pairs with more turns than this in the original context are unchanged.
        beta_slow: `yarn` only, frequencies of pairs with fewer turns than this are divided by `factor`.
        truncate: `yarn` only, True if the ramp begins and ends at whole pairs.
        short_factors: `longrope` only, factors of the pairs' wavelengths in texts of at most `original_max_positions`
            tokens.
        long_factors: `longrope` only, the factors in longer texts.
        attention_factor: `yarn` and `longrope` only, factor of rotated dimensions; None for that of the papers,
            1 + ln(factor) / 10 and sqrt(1 + ln(factor) / ln(original_max_positions)).
        fraction: `proportional` only, part of the pairs that are rotated; the others keep frequency 0.
    """

    width: int
    theta: float = 10_000.0
    interleaved: bool = False
    scaling: Literal["none", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None
    attention_factor: float | None = None
    fraction: float = 1.0

    def __post_init__(self) -> None:
        if self.width % 2:
            raise ValueError(f"RoPE turns pairs of dimensions, so its width must be even, not {self.width}.")
        if self.scaling == "llama3" and self.low_freq_factor > self.high_freq_factor:
            raise ValueError(
                f"llama3 RoPE needs low_freq_factor up to high_freq_factor, not {self.low_freq_factor} "
                f"and {self.high_freq_factor}."
            )
        if self.scaling == "dynamic" and self.width < 4:
            raise ValueError(f"dynamic RoPE needs a width from 4, not {self.width}.")
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            count = self.width // 2 if self.scaling == "longrope" else None
            if (None if factors is None else len(factors)) != count:
                raise ValueError(
                    f"{name}={factors!r} does not fit {self.scaling} RoPE of width {self.width}; give "
                    f"{'none' if count is None else f'{count} numbers, one for each pair'}."
                )

    @property
    def by_length(self) -> bool:
        """True if frequencies depend on the length of the text."""
        return self.scaling in ("dynamic", "longrope")

    @property
    def magnitude(self) -> float:
        """Factor of rotated dimensions."""
        if self.scaling not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        if self.scaling == "yarn":
            return 1 + 0.1 * math.log(self.factor)
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_positions))


Length = int | Int[Array, "..."]
"""Number of tokens of a whole text, for frequencies that depend on it."""


def rope_frequencies(
    rope: Rope, length: Length | None = None
) -> Float[np.ndarray, "*b half"] | Float[Array, "*b half"]:
    """Return the radians per position of each rotated pair after scaling.

    The result is float64 in NumPy, or a JAX array if the frequencies depend on a length that is a JAX array.
    """
    exponents = np.arange(0, rope.width, 2) / rope.width
    frequencies = rope.theta**-exponents
    if rope.by_length and length is None:
        raise ValueError(f"the frequencies of {rope.scaling} RoPE depend on the length of the text; give it.")
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "proportional":
        rotated = np.arange(rope.width // 2) < int(rope.fraction * rope.width // 2)
        return np.where(rotated, frequencies / rope.factor, 0.0)
    if rope.scaling == "llama3":
        wavelengths = 2 * math.pi / frequencies
        above = rope.original_max_positions / wavelengths - rope.low_freq_factor
        span = rope.high_freq_factor - rope.low_freq_factor
        smooth = np.clip(above / span, 0.0, 1.0) if span else (above >= 0).astype(float)
        return (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    if rope.scaling == "yarn":
        interpolated = _yarn_ramp(rope)
        return frequencies * (1 - interpolated) + frequencies / rope.factor * interpolated
    if rope.by_length:
        xp = jnp if isinstance(length, jax.Array) else np
        beyond = xp.asarray(length)[..., None]
        if rope.scaling == "dynamic":
            stretch = xp.maximum(beyond / rope.original_max_positions, 1.0) * rope.factor - (rope.factor - 1)
            return frequencies * stretch ** -(exponents * rope.width / (rope.width - 2))
        short, long = (frequencies / np.asarray(factors) for factors in (rope.short_factors, rope.long_factors))
        return xp.where(beyond > rope.original_max_positions, long, short)
    return frequencies


def _yarn_ramp(rope: Rope) -> Float[np.ndarray, " half"]:
    """Return the interpolation weight of each pair, from 0 to 1 (YaRN, section 3.2)."""

    def pair(turns: float) -> float:
        return rope.width * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.width - 1)
    return np.clip((np.arange(rope.width // 2) - low) / (high - low or 0.001), 0.0, 1.0)


def rotate(
    rope: Rope | None, x: Float[Array, "*b t d"], positions: Int[Array, "*#b #t"], length: Length | None = None
) -> Float[Array, "*b t d"]:
    """Rotate queries or keys by their positions; return them unchanged for models without RoPE.

    `length` is that of the whole text, one number or one per row; used only if frequencies depend on it.
    """
    return x if rope is None else rotate_by(rope, x, turns_of(rope, positions, x.dtype, length))


def lengths_by_frequencies(
    ropes: Sequence[Rope | None], lengths: Int[np.ndarray, "*b"]
) -> Int[np.ndarray, "*b"] | None:
    """Return lengths whose RoPE frequencies texts of these lengths have, or None if lengths do not matter.

    Texts with the same frequencies get the same length, except with RoPE layers of different original contexts.
    """
    by_length = [rope for rope in ropes if rope is not None and rope.by_length]
    if not by_length:
        return None
    borders = [rope.original_max_positions for rope in by_length]
    longest = max(borders) + 1 if all(rope.scaling == "longrope" for rope in by_length) else None
    return np.clip(lengths, min(borders), longest).astype(np.int32)


class Turns(NamedTuple):
    """Rotation of a token's queries and keys: the factor of each channel, and that of the other channel in its pair."""

    cos: Float[Array, "*b width"]
    sin: Float[Array, "*b width"]


def turns_of(
    rope: Rope, positions: Int[Array, "*b"], dtype: DTypeLike, length: Length | None = None, places: int | None = None
) -> Turns:
    """Compute the rotations of tokens for `rotate_by`, with the arguments of `rotate`.

    `dtype` is the dtype of queries and keys; `places` is an upper bound that all positions are below, if known.
    """
    with jax.named_scope("rope"):
        if positions.shape[-1] > 1:
            return Turns(*whole_widths(*_angles(rope, positions, dtype, length, places=places), rope.interleaved))
        # For a single token, XLA on TPU would pad and join the halves in separate programs.
        cos, sin = _angles(rope, positions, dtype, length, of_channels=True, places=places)
        ones = jnp.ones(rope.width // 2, sin.dtype)
        return Turns(cos, sin * whole_widths(ones, ones, rope.interleaved)[1])


def rotate_by(rope: Rope, x: Float[Array, "*b t d"], turns: Turns) -> Float[Array, "*b t d"]:
    """Rotate queries or keys by the rotations of their tokens."""
    with jax.named_scope("rope"):
        return turn(x, *turns, rope.interleaved)


def rotate_heads(
    rope: Rope,
    qk: Sequence[Float[Array, "b ... t d"]],
    turns: Turns,
    still: Sequence[Float[Array, "b ... t e"]] = (),
    **how: Unpack[How],
) -> tuple[Float[Array, "b ... t _"], ...]:
    """Rotate queries and keys, `qk`, and return values, `still`, unchanged.

    For single tokens an accelerator runs the operation `rope`, which on a TPU also moves the heads of values to
    separate rows. XLA replaces an implementation that does not support the inputs.
    """
    # Put all heads in one axis: with more axes, XLA on TPU copies the halves.
    arrays, options = (*qk, *still), options_of(**how)
    flat, is_token = [x.reshape(len(x), -1, *x.shape[-2:]) for x in arrays], turns.cos.shape[1] == 1
    if is_token:
        flat, turns = [x[:, :, 0] for x in flat], Turns(*(x[:, 0] for x in turns))
    queries_and_keys, values = flat[: len(qk)], flat[len(qk) :]
    if is_token and options.runs_kernels:
        how["implementation"] = or_xla(options.implementation)
        with jax.named_scope("rope"):
            outputs = rotate_token(queries_and_keys, *turns, values, interleaved=rope.interleaved, **how)
    else:
        of_heads = Turns(*(x[:, None] for x in turns))
        outputs = (*(rotate_by(rope, x, of_heads) for x in queries_and_keys), *values)
    return tuple(x.reshape(like.shape) for x, like in zip(outputs, arrays, strict=True))


def cos_sin_table(rope: Rope, places: int, dtype: DTypeLike) -> tuple[Float[Array, "m half"], Float[Array, "m half"]]:
    """Compute cosines and sines of the angles of the first `places` positions, as constants of a program.

    Otherwise XLA would fuse the sines into their consumers and compute them again for every slot.
    """
    with jax.ensure_compile_time_eval():
        return _angles(rope, jnp.arange(places), dtype)


def _angles(
    rope: Rope,
    positions: Int[Array, "*b"],
    dtype: DTypeLike,
    length: Length | None = None,
    of_channels: bool = False,
    places: int | None = None,
) -> tuple[Float[Array, "*b w"], Float[Array, "*b w"]]:
    """Compute cosines and sines of the angles of each pair of channels, or each channel, in at least float32."""
    # Far out in a text, a plain product would spend its precision on full turns and lose the angle's last digits.
    kind = jnp.promote_types(dtype, jnp.float32)
    if isinstance(length, jax.Array):
        length = length.reshape(-1, *(1,) * (positions.ndim - 1))
    frequencies = rope_frequencies(rope, length)
    per_stretch, per_place = (jnp.asarray(x, kind) for x in (STRETCH * frequencies % (2 * math.pi), frequencies))
    if of_channels:
        per_stretch, per_place = (whole_widths(x, x, rope.interleaved)[0] for x in (per_stretch, per_place))
    if places is not None and places <= STRETCH:
        angles = positions[..., None] * per_place
    else:
        stretch, place = jnp.divmod(positions[..., None], STRETCH)
        angles = stretch * per_stretch + place * per_place
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if rope.magnitude == 1 else (cos * rope.magnitude, sin * rope.magnitude)
