"""Choosing the next token: greedy, temperature, top-k and top-p, one random key per row."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; hashable, so it can be a static argument of `jit`.

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


def sample(logits: Float[Array, "b vocab"], keys: Key[Array, " b"], sampling: Sampling) -> Int[Array, " b"]:
    """Draw one token per row; a row's token depends on its own logits and key alone.

    The noise belongs to the token and not to its place among the likeliest, so a filter that excludes nothing changes
    nothing, and without filters the draw is `jax.random.categorical(key, logits / temperature)`.

    Args:
        logits: unnormalised log-probabilities [b, vocab]; -inf excludes a token.
        keys: one typed random key per row [b], as `jax.random.split` gives them; unused when greedy.
        sampling: the settings; static under `jit`.

    Returns:
        Token ids [b], int32.

    Raises:
        ValueError: there is not one key per row.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if keys.shape != logits.shape[:1]:
        raise ValueError(f"{logits.shape[0]} rows need as many random keys, not {keys.shape}: use jax.random.split.")
    return jax.vmap(lambda row, key: jax.random.categorical(key, _filter(row, sampling)))(logits, keys).astype(
        jnp.int32
    )


def _filter(logits: Float[Array, " vocab"], sampling: Sampling) -> Float[Array, " vocab"]:
    """Logits over the temperature, -inf for the tokens that top-k and top-p exclude."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    logits = (logits - logits.max()) / sampling.temperature  # at most 0, so a tiny temperature cannot overflow to +inf
    top_p = 1.0 if sampling.top_p is None else sampling.top_p
    if sampling.top_k is None and top_p == 1:
        return logits
    vocab = logits.shape[0]
    best, tokens = jax.lax.top_k(logits, vocab if sampling.top_k is None else min(sampling.top_k, vocab))
    if top_p < 1:
        probs = jax.nn.softmax(best)
        before = jnp.cumsum(probs) - probs  # what the likelier tokens hold; 0 for the first, which therefore stays
        best = jnp.where(before < top_p, best, -jnp.inf)
    return jnp.full_like(logits, -jnp.inf).at[tokens].set(best, unique_indices=True)
