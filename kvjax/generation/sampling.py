"""Sampling of the next token: greedy, temperature, top-k, top-p, min-p and a repetition penalty, one key per row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.models.model import SETTINGS, SamplingDefaults

ALL = 2**31 - 1
"""Value of `top_k` that keeps all tokens of any vocabulary."""
LEAST, MOST = 1e-30, 1e30
"""Numbers beyond these have the same effect as these; in float32 they would become 0 or infinite."""
TEMPERATURE = 0.8
"""Temperature where neither a user nor the model's checkpoint gives one."""
GREEDY: Mapping[str, Any] = MappingProxyType({"temperature": 0.0, "repetition_penalty": 1.0})
"""Settings of greedy decoding that leave the model's own defaults without effect."""


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling settings: hashable, and a pytree whose numbers are arguments of compiled programs.

    In a program, a number may be an array [b] with one value per row.

    Args:
        temperature: divides the logits, at least 0; 0 takes the likeliest token and ignores the filters.
        top_k: sample from this many likeliest tokens, at least 1; None, 0 or -1 for all of them.
        top_p: sample from the fewest likeliest tokens that have this fraction of the probability left by `top_k`,
            in [0, 1]; 0 for the likeliest token, None or 1 for all of them (nucleus sampling, Holtzman et al., 2020,
            equations 2 and 3).
        min_p: sample from the tokens whose probability is at least this fraction of the likeliest one's, in [0, 1];
            None or 0 for all of them (Nguyen et al., 2024, equations 1 and 2).
        repetition_penalty: divides the positive logits of tokens in the text and multiplies their negative ones,
            before other settings apply, above 0; None or 1 for no penalty (CTRL, Keskar et al., 2019, section 4.1).

    Raises:
        ValueError: a setting is out of its range.
    """

    temperature: float = TEMPERATURE
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if (value is not None or name == "temperature") and not _is_number(value):
                raise ValueError(f"{name} is {value!r}: give a number.")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"The temperature is {self.temperature}: give 0 for greedy decoding or a positive number.")
        if self.top_k in (0, -1):
            object.__setattr__(self, "top_k", None)
        if self.top_k is not None and not (self.top_k >= 1 and self.top_k % 1 == 0):
            raise ValueError(f"top_k is {self.top_k}: give a whole number of tokens, at least 1, or 0 for all.")
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: give a share of the probability, 0 to 1, or None.")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(
                f"min_p is {self.min_p}: give a share of the likeliest token's probability, 0 to 1, or None."
            )
        penalty = self.repetition_penalty
        if penalty is not None and not 0 < penalty < math.inf:
            raise ValueError(f"repetition_penalty is {penalty}: give a positive number, 1 for no penalty, or None.")
        # One type for each setting, or 1 and 1.0 would compile two programs.
        if self.top_k is not None:
            object.__setattr__(self, "top_k", min(int(self.top_k), ALL))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            if (number := getattr(self, name)) is not None:
                none = LEAST if name == "top_p" else 0.0  # a share of the probability that the likeliest token exceeds
                object.__setattr__(self, name, float(min(max(number, LEAST), MOST)) if number else none)

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        """Return the numbers, whose types are the same for all settings."""
        settings = self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty
        neutral = 0.0, ALL, 1.0, 0.0, 1.0
        return tuple(no if number is None else number for number, no in zip(settings, neutral, strict=True)), None

    @classmethod
    def tree_unflatten(cls, _: None, numbers: tuple[Any, ...]) -> Sampling:
        """Build the settings without checks, since JAX may pass any objects as numbers."""
        sampling = object.__new__(cls)
        for field, number in zip(dataclasses.fields(cls), numbers, strict=True):
            object.__setattr__(sampling, field.name, number)
        return sampling


def _is_number(value: Any) -> bool:
    return not isinstance(value, (bool, np.bool_)) and hasattr(value, "__float__") and np.ndim(value) == 0


_FILTERS = ("top_k", "top_p", "min_p")


def sampling_of(defaults: SamplingDefaults, settings: Mapping[str, Any], temperature: float = TEMPERATURE) -> Sampling:
    """Return a user's settings, completed with a model's defaults.

    Args:
        settings: the user's, by name; None for those that the user does not give. Other names have no effect.
        temperature: temperature if neither the user nor the model has one.

    Raises:
        ValueError: a setting is out of its range; the message names the file of the model's.
    """
    user_settings = {name: settings[name] for name in SETTINGS if settings.get(name) is not None}
    Sampling(**user_settings)
    model_settings = {name: value for name, value in defaults.settings.items() if name not in user_settings}
    samples = model_settings.pop("do_sample", True)
    try:
        if "temperature" not in user_settings:
            if type(samples) is not bool:
                raise ValueError(f"do_sample is {samples!r}: give true or false.")
            model_settings |= {} if samples else {"temperature": 0.0}
        if 0 in (user_settings.get("temperature"), model_settings.get("temperature")):  # filters have no effect
            model_settings = {name: value for name, value in model_settings.items() if name not in _FILTERS}
        Sampling(**model_settings)
    except ValueError as error:
        raise ValueError(f"{defaults.source}: {str(error).rstrip('.')}, or replace it by a setting of yours.") from None
    values: dict[str, Any] = {"temperature": temperature, **model_settings, **user_settings}
    return Sampling(**values)


def defaults_in_force(defaults: SamplingDefaults, settings: Mapping[str, Any]) -> dict[str, float]:
    """Return the model's defaults that change how texts are sampled beside a user's settings, by name."""
    sampling = sampling_of(defaults, settings)
    names = [name for name in SETTINGS if settings.get(name) is None and name in defaults.settings]
    if defaults.settings.get("do_sample") is False and settings.get("temperature") is None:
        names = ["temperature", *(name for name in names if name != "temperature")]
    idle = {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    values = {name: getattr(sampling, name) for name in names}
    return {name: value for name, value in values.items() if value is not None and value != idle.get(name)}


def penalised(
    logits: Float[Array, "b vocab"], in_text: Bool[Array, "b vocab"], penalty: float | Float[Array, "*b"]
) -> Float[Array, "b vocab"]:
    """Apply the repetition penalty to the logits of tokens in the text; see `Sampling`."""
    penalty = _of_rows(penalty, logits.dtype)
    return jnp.where(in_text, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def _of_rows(number: Any, dtype: DTypeLike | None = None) -> Array:
    """Reshape a setting to broadcast against logits [b vocab]; it is one number, or one per row."""
    array = jnp.asarray(number, dtype)
    return array[:, None] if array.ndim else array


def sample(
    logits: Float[Array, "b vocab"],
    keys: Key[Array, " b"],
    sampling: Sampling,
    in_text: Bool[Array, "b vocab"] | None = None,
) -> Int[Array, " b"]:
    """Sample one token per row; it depends only on the logits and the key of its row.

    The noise of a token depends on its id, not on its rank. A filter that excludes no token therefore changes nothing,
    and without filters the sample is `jax.random.categorical(key, logits / temperature)`.

    Args:
        logits: unnormalized log-probabilities; -inf excludes a token.
        keys: one typed random key per row, as from `jax.random.split`; unused when greedy.
        sampling: the settings, an argument under `jit`; all settings use the same program.
        in_text: True for tokens in each row's text, for the repetition penalty.
    """
    penalty = sampling.repetition_penalty
    if in_text is None and isinstance(penalty, float) and penalty != 1.0:
        raise ValueError(f"repetition_penalty={penalty} is on tokens that the text has: give them as `in_text`.")
    if keys.shape != logits.shape[:1]:
        raise ValueError(f"{logits.shape[0]} rows need as many random keys, not {keys.shape}: use jax.random.split.")
    return _sample(logits, keys, sampling, in_text)


@jax.jit
def _sample(
    logits: Float[Array, "b vocab"],
    keys: Key[Array, " b"],
    sampling: Sampling,
    in_text: Bool[Array, "b vocab"] | None,
) -> Int[Array, " b"]:
    if in_text is not None:
        logits = penalised(logits, in_text, sampling.tree_flatten()[0][4])
    warm = jnp.asarray(sampling.temperature) > 0

    def likeliest(_: None) -> Int[Array, " b"]:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw(_: None) -> Int[Array, " b"]:
        token = jax.vmap(jax.random.categorical)(keys, _filtered(logits, sampling)).astype(jnp.int32)
        return jnp.where(warm, token, likeliest(None)) if warm.ndim else token

    return jax.lax.cond(warm.any(), draw, likeliest, None)


def _filtered(logits: Float[Array, "b vocab"], sampling: Sampling) -> Float[Array, "b vocab"]:
    """Return logits divided by the temperature, with -inf for tokens that top-k, top-p or min-p excludes."""
    temperature, top_k, top_p, min_p, _ = map(_of_rows, sampling.tree_flatten()[0])
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    # At most 0, so a tiny temperature cannot overflow to +inf.
    logits = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    # For numbers >= 0, comparing the bits as integers is the same as comparing the numbers.
    rank = jax.lax.bitcast_convert_type(jnp.abs(logits), jnp.dtype(f"int{jnp.finfo(logits.dtype).bits}"))

    # One loop runs the requested ones of top-k and top-p, since two copies of its body would take longer to compile.
    def one(filter: Array, logits: Float[Array, "b vocab"]) -> Float[Array, "b vocab"]:
        by_share = filter == 1
        weight = jnp.where(by_share, jax.nn.softmax(logits), 1.0)
        # A row that does not use this filter never reaches its total, so it keeps all tokens.
        total = jnp.where(by_share, jnp.where(uses_top_p, top_p, jnp.inf), jnp.where(uses_top_k, top_k, jnp.inf))
        return jnp.where(_first(rank, weight, total), logits, -jnp.inf)

    uses_top_k, uses_top_p = top_k < logits.shape[1], top_p < 1
    begin, end = jnp.where(uses_top_k.any(), 0, 1), jnp.where(uses_top_p.any(), 2, 1)
    filtered = jax.lax.fori_loop(begin, end, one, logits)
    return jnp.where(filtered >= jnp.log(min_p), filtered, -jnp.inf)  # the likeliest token's logit is 0


def _first(rank: Int[Array, "b n"], weight: Float[Array, "b n"], total: Float[Array, "*b"]) -> Bool[Array, "b n"]:
    """Return a mask of the fewest tokens, by rank and then index, whose weights reach a total; or all tokens."""
    # A binary search finds the last rank bit by bit, then the last index among tokens of that rank. It needs one pass
    # per bit, and on a CPU is many times faster than sorting a vocabulary.
    place = jax.lax.broadcasted_iota(rank.dtype, rank.shape, 1)
    bits, places = jnp.iinfo(rank.dtype).bits - 1, rank.shape[1].bit_length()

    def upto(last: Int[Array, "b 1"], end: Int[Array, "b 1"]) -> Bool[Array, "b n"]:
        return (rank < last) | ((rank == last) & (place <= end))

    def lower(i: Array, limits: tuple[Array, Array]) -> tuple[Array, Array]:
        of_rank = i < bits
        bit = jnp.left_shift(jnp.ones((), rank.dtype), jnp.where(of_rank, bits, bits + places) - 1 - i)
        less = jnp.where(of_rank, limits[0] & ~bit, limits[0]), jnp.where(of_rank, limits[1], limits[1] & ~bit)
        reaches = jnp.where(upto(*less), weight, 0.0).sum(-1, keepdims=True) >= total
        return jnp.where(reaches, less[0], limits[0]), jnp.where(reaches, less[1], limits[1])

    maxima = (jnp.full((rank.shape[0], 1), 2**size - 1, rank.dtype) for size in (bits, places))
    return upto(*jax.lax.fori_loop(0, bits + places, lower, tuple(maxima)))
