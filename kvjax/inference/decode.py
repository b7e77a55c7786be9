"""Decode steps: one token after another from a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from kvjax.cache.dense import Dense
from kvjax.inference.autotune import settle_before
from kvjax.inference.layers import Reading, read_token
from kvjax.inference.prepare import check_vocabulary
from kvjax.inference.sharding import OF_ROWS, logits_spec, on_mesh
from kvjax.inference.state import Moving, State, check_state, join_state, split_state, state_specs
from kvjax.models.decoder import unembed
from kvjax.models.sharding import on_device


def decode_step(
    state: State, token: Int[Array, " b"] | ArrayLike | Sequence[int]
) -> tuple[State, Float[Array, "b vocab"]]:
    """Write one token per row into the cache and return the logits for the next token.

    The function is pure and compiled, and it works under `jit`, `scan` and `vmap`. A jitted function of your own that
    returns a state also copies its weights. To avoid the copy, return and donate only `storage` and `position`.

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
    moving, logits = _step(*split_state(state), token)
    return join_state(state, moving), logits


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
    moving, logits = _step_in_place(*split_state(state), token)
    return join_state(state, moving), logits


def checked_token(state: State, token: ArrayLike | Sequence[int]) -> Int[Array, " b"]:
    """Check one token for each row of a state, and return them as an array.

    Raises:
        TypeError: if the tokens are not integers.
        ValueError: if there is not one token for each row, or one given on the host is not in the vocabulary.
    """
    check_state(state)
    if isinstance(token, State):
        raise TypeError("the second argument is a token for each row, not a State; the state comes first.")
    rows = state.active.shape[0]
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
    return jnp.asarray(token, jnp.int32)


def _step_parts(fixed: State, moving: Moving, token: Int[Array, " b"]) -> tuple[Moving, Float[Array, "b vocab"]]:
    after, logits = step(join_state(fixed, moving), token)
    return split_state(after)[1], logits


_step = jax.jit(_step_parts)
_step_in_place = jax.jit(_step_parts, donate_argnums=1)


def step_shapes(state: State) -> tuple[Moving, Float[Array, "b vocab"]]:
    """Return the shapes of the results of a state's step, as `jax.ShapeDtypeStruct`."""
    return _step.eval_shape(*split_state(state), jax.ShapeDtypeStruct(state.active.shape, jnp.int32))


def settle_step(state: State) -> None:
    """Benchmark the kernels of a state's step if `auto` needs it; see `settle_before`."""
    settle_before(lambda kernels: step_shapes(state.replace(kernels=kernels)), state.kernels)


def lower_step(state: State) -> jax.stages.Lowered:
    """Lower the program of `decode_step_in_place`, to compile it and read its `memory_analysis()`."""
    return trace_step(state).lower()


def trace_step(state: State) -> Any:
    """Trace the program of `decode_step_in_place`; the result is that of `jit(...).trace`."""
    return _step_in_place.trace(*split_state(state), jax.ShapeDtypeStruct(state.position.shape, jnp.int32))


def step(state: State, token: Int[Array, " b"]) -> tuple[State, Float[Array, "b vocab"]]:
    """Run `decode_step` without compiling it, for loops that are compiled as a whole."""
    fixed, moving = split_state(state)
    of_fixed, of_moving = state_specs(state)
    made = of_moving, logits_spec(state.config, state.mesh)
    moving, logits = on_mesh(_on_device, state.mesh, (of_fixed, of_moving, OF_ROWS), made)(fixed, moving, token)
    return join_state(fixed, moving), logits


def _on_device(fixed: State, moving: Moving, token: Int[Array, " b"]) -> tuple[Moving, Float[Array, "b vocab"]]:
    state = join_state(fixed, moving)
    config = on_device(state.config, state.mesh, shares_slots=isinstance(state.storage, Dense))
    after = state.position + state.active
    reading = Reading(
        token=token[:, None],
        position=jnp.where(state.active, state.position, -1)[:, None],
        prompt_length=state.prompt_length,
        read=after,
        horizon=state.horizon,
        end=state.end,
        seed=state.seed,
        given=False,
        kernels=state.kernels,
    )
    storage, hidden = read_token(state.weights, config, state.policy, state.storage, reading)
    logits = unembed(state.weights, config, hidden[:, 0])
    if state.policy.plan.sizing.fixed_length:
        logits = jnp.where((state.position < state.end)[:, None], logits, jnp.nan)
    if state.config.position == "learned":
        logits = jnp.where((state.position < state.config.max_positions)[:, None], logits, jnp.nan)
    return (storage, after), logits
