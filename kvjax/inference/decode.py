"""Decode steps: one token after another from a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from kvjax.inference.decoder import compiled_step, compiled_step_in_place
from kvjax.inference.prepare import check_vocabulary
from kvjax.inference.state import State, check_state


def decode_step(
    state: State, token: Int[Array, " b"] | ArrayLike | Sequence[int]
) -> tuple[State, Float[Array, "b vocab"]]:
    """Write one token per row into the cache and return the logits for the next token.

    The function is pure and compiled, and it works under `jit`, `scan` and `vmap`. A jitted function of your own that
    returns a state also copies its weights. To avoid the copy, return only its `cache`, or compile `Decoder.step`.

    Args:
        state: from `prefill` or an earlier step; it stays valid, so a prompt can be continued many times.
        token: integers [b] in [0, vocab_size); those of rows that are not `active` are ignored. Lists and NumPy arrays
            are checked. Of a `jax.Array` only shape and type are checked, because reading it would wait for the device.

    Returns:
        The next state, and logits [b, vocab]. With the full cache, logits beyond the planned length are NaN: no slot is
        left, and no token may be evicted. They are also NaN for policies that reserve slots for that length, and beyond
        the end of a model's table of positions. RoPE and ALiBi have no such end; quality beyond the trained length
        depends on the model.

    Raises:
        TypeError: if the tokens are not integers.
        ValueError: if there is not one token for each row, or one is not in the vocabulary.

    Example:
        >>> model = kvjax.load("tiny")
        >>> state, logits = kvjax.prefill(model, "h2o", [[5, 17, 42]], budget=16, max_new_tokens=8)
        >>> after, logits = kvjax.decode_step(state, logits.argmax(-1))
        >>> state.position.tolist(), after.position.tolist(), logits.shape
        ([3], [4], (1, 2048))
    """
    token = checked_token(state, token)
    cache, logits = compiled_step(state.decoder, state.cache.replace(key=None), token)
    return State(state.decoder, cache.replace(key=state.cache.key)), logits


def decode_step_in_place(
    state: State, token: Int[Array, " b"] | ArrayLike | Sequence[int]
) -> tuple[State, Float[Array, "b vocab"]]:
    """Run `decode_step` in the memory of the given state's caches, which become invalid; its weights stay valid.

    Example:
        >>> model = kvjax.load("tiny")
        >>> state, logits = kvjax.prefill(model, "h2o", [[5, 17, 42]], budget=16, max_new_tokens=8)
        >>> for _ in range(4):
        ...     state, logits = kvjax.decode_step_in_place(state, logits.argmax(-1))
        >>> state.position.tolist()
        [7]
    """
    token = checked_token(state, token)
    cache, logits = compiled_step_in_place(state.decoder, state.cache.replace(key=None), token)
    return State(state.decoder, cache.replace(key=state.cache.key)), logits


def checked_token(state: State, token: ArrayLike | Sequence[int]) -> Int[Array, " b"]:
    """Check one token for each row of a state, with the errors of `decode_step`, and return them as an array."""
    check_state(state)
    if isinstance(token, State):
        raise TypeError("the second argument is a token for each row, not a State; the state comes first.")
    rows = len(state.cache.active)
    if not isinstance(token, jax.Array):
        try:
            token = np.asarray(token)
        except ValueError as error:
            raise ValueError(f"tokens={token!r} are not one for each of {rows} rows.") from error
    if not jnp.issubdtype(token.dtype, jnp.integer):
        raise TypeError(f"tokens of type {token.dtype} are no token ids; give integers.")
    if token.shape != (rows,):
        raise ValueError(f"tokens of shape {list(token.shape)} are not one for each of {rows} rows.")
    if isinstance(token, np.ndarray):
        check_vocabulary(token, state.config)
        return jax.device_put(token.astype(np.int32))
    return token.astype(jnp.int32)


def lower_step(state: State) -> jax.stages.Lowered:
    """Lower the program of `decode_step_in_place`, to compile it and read its `memory_analysis()`."""
    return trace_step(state).lower()


def trace_step(state: State) -> Any:
    """Trace the program of `decode_step_in_place`; the result is that of `jit(...).trace`."""
    tokens = jax.ShapeDtypeStruct(state.position.shape, jnp.int32)
    return compiled_step_in_place.trace(state.decoder, state.cache.replace(key=None), tokens)
