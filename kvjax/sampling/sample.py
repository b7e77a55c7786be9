"""Choosing the next token: greedy, temperature, top-k and top-p, one random key per row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Num

ALL = 2**31 - 1
"""As `top_k`: more tokens than any vocabulary has."""


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: a pytree, whose numbers a program takes as arguments, and hashable.

    Args:
        temperature: divides the logits, at least 0; 0 takes the likeliest token, whatever the other settings.
        top_k: draw from this many likeliest tokens, at least 1; None for all of them.
        top_p: draw from the fewest likeliest tokens that hold this share of the probability left by `top_k`,
            in (0, 1]; None or 1 for all of them (nucleus sampling, Holtzman et al., 2020, equations 2 and 3).

    Raises:
        ValueError: a setting is out of its range.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"The temperature is {self.temperature}: give 0 for greedy decoding or a positive number.")
        if self.top_k is not None and (self.top_k != int(self.top_k) or self.top_k < 1):
            raise ValueError(f"top_k is {self.top_k}: give a whole number of tokens, at least 1, or None.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: give a share of the probability above 0 and at most 1, or None.")
        # Of one type each, or 1 and 1.0 would be arguments of two programs.
        object.__setattr__(self, "temperature", float(self.temperature))
        if self.top_k is not None:
            object.__setattr__(self, "top_k", min(int(self.top_k), ALL))
        if self.top_p is not None:
            object.__setattr__(self, "top_p", float(self.top_p))

    def tree_flatten(self) -> tuple[tuple[Any, Any, Any], None]:
        """Numbers, of the same types whatever the settings are."""
        top_p = 1.0 if self.top_p is None else self.top_p
        return (self.temperature, ALL if self.top_k is None else self.top_k, top_p), None

    @classmethod
    def tree_unflatten(cls, _: None, numbers: tuple[Any, Any, Any]) -> Sampling:
        """With whatever stands for numbers, which cannot be checked."""
        made = object.__new__(cls)
        for field, number in zip(dataclasses.fields(cls), numbers, strict=True):
            object.__setattr__(made, field.name, number)
        return made


def sample(logits: Float[Array, "b vocab"], keys: Key[Array, " b"], sampling: Sampling) -> Int[Array, " b"]:
    """Draw one token per row; a row's token depends on its own logits and key alone.

    The noise belongs to the token and not to its place among the likeliest, so a filter that excludes nothing changes
    nothing, and without filters the draw is `jax.random.categorical(key, logits / temperature)`.

    Args:
        logits: unnormalised log-probabilities [b, vocab]; -inf excludes a token.
        keys: one typed random key per row [b], as `jax.random.split` gives them; unused when greedy.
        sampling: the settings; under `jit` an argument, for other settings take the same program.

    Returns:
        Token ids [b], int32.

    Raises:
        ValueError: there is not one key per row.
    """
    if keys.shape != logits.shape[:1]:
        raise ValueError(f"{logits.shape[0]} rows need as many random keys, not {keys.shape}: use jax.random.split.")
    return _sample(logits, keys, sampling)


@jax.jit
def _sample(logits: Float[Array, "b vocab"], keys: Key[Array, " b"], sampling: Sampling) -> Int[Array, " b"]:
    def likeliest(_: None) -> Int[Array, " b"]:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def drawn(_: None) -> Int[Array, " b"]:
        return jax.vmap(jax.random.categorical)(keys, _filtered(logits, sampling)).astype(jnp.int32)

    return jax.lax.cond(sampling.temperature > 0, drawn, likeliest, None)


def _filtered(logits: Float[Array, "b vocab"], sampling: Sampling) -> Float[Array, "b vocab"]:
    """Logits over the temperature, -inf for the tokens that top-k and top-p exclude."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    # At most 0, so a tiny temperature cannot overflow to +inf.
    logits = (logits - logits.max(axis=-1, keepdims=True)) / sampling.temperature
    # The bits of numbers that are not negative have the order of the numbers.
    rank = jax.lax.bitcast_convert_type(jnp.abs(logits), jnp.dtype(f"int{jnp.finfo(logits.dtype).bits}"))

    def top_k(logits: Float[Array, "b vocab"]) -> Float[Array, "b vocab"]:
        return jnp.where(_first(rank, jnp.ones_like(rank), sampling.top_k), logits, -jnp.inf)

    def top_p(logits: Float[Array, "b vocab"]) -> Float[Array, "b vocab"]:
        return jnp.where(_first(rank, jax.nn.softmax(logits), sampling.top_p), logits, -jnp.inf)

    for filtered, asked in ((top_k, sampling.top_k < logits.shape[1]), (top_p, sampling.top_p < 1)):  # type: ignore[operator]
        logits = jax.lax.cond(asked, filtered, lambda logits: logits, logits)
    return logits


def _first(rank: Int[Array, "b n"], weight: Num[Array, "b n"], total: Any) -> Bool[Array, "b n"]:
    """The fewest tokens of the lowest ranks whose weights reach a total, of equals the first ones; or else all."""
    # Bit by bit the last rank is found in as many passes as a number has bits, many times faster than by sorting a
    # vocabulary on a CPU.
    place = jax.lax.broadcasted_iota(jnp.int32, rank.shape, 1)

    def held(mask: Bool[Array, "b n"]) -> Num[Array, "b 1"]:
        return jnp.where(mask, weight, jnp.zeros((), weight.dtype)).sum(-1, keepdims=True)

    def least(reaches: Callable[[Array], Array], bits: int, dtype: Any) -> Int[Array, "b 1"]:
        def lower(i: Array, found: Array) -> Array:
            less = found & ~(jnp.ones((), dtype) << (bits - 1 - i).astype(dtype))
            return jnp.where(reaches(less), less, found)

        return jax.lax.fori_loop(0, bits, lower, jnp.full((rank.shape[0], 1), 2**bits - 1, dtype))

    last = least(lambda last: held(rank <= last) >= total, jnp.iinfo(rank.dtype).bits - 1, rank.dtype)
    equal, left = rank == last, total - held(rank < last)
    end = least(lambda end: held(equal & (place <= end)) >= left, rank.shape[1].bit_length(), jnp.int32)
    return (rank < last) | (equal & (place <= end))
