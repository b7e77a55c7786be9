"""Writing one token after another from a cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.engine.layer import Reading, read_token
from kvjax.engine.state import Moving, State, join_state, split_state
from kvjax.models.decoder import unembed


def decode_step(state: State, token: Int[Array, " b"]) -> tuple[State, Float[Array, "b vocab"]]:
    """Write one token per row into the cache and return the logits for the next.

    Pure, compiled, and fit for `jit`, `scan` and `vmap`. A function of your own that is jitted and returns a state
    also returns (copies) its weights; return what changed, or donate, where that matters.

    Args:
        state: from `prefill` or an earlier step; it stays valid, so a prompt can be continued many times.
        token: [b]; those of rows that are not `active` are not read.

    Returns:
        The next state, and logits [b, vocab]. With the full cache, logits beyond the planned length are NaN:
        there is no slot left and nothing may leave; so it is for policies that set slots aside for that length.
    """
    moving, logits = _step(*split_state(state), token)
    return join_state(state, moving), logits


def decode_step_in_place(state: State, token: Int[Array, " b"]) -> tuple[State, Float[Array, "b vocab"]]:
    """`decode_step` that reuses the memory of the given state's caches, which are gone afterwards; weights stay."""
    moving, logits = _step_in_place(*split_state(state), token)
    return join_state(state, moving), logits


def _step_parts(fixed: State, moving: Moving, token: Int[Array, " b"]) -> tuple[Moving, Float[Array, "b vocab"]]:
    after, logits = step(join_state(fixed, moving), token)
    return split_state(after)[1], logits


_step = jax.jit(_step_parts)
_step_in_place = jax.jit(_step_parts, donate_argnums=1)


def lower_step(state: State) -> jax.stages.Lowered:
    """The program of `decode_step_in_place`, to compile and ask for its `memory_analysis()`."""
    return _step_in_place.lower(*split_state(state), jnp.zeros(state.position.shape, jnp.int32))


def step(state: State, token: Int[Array, " b"]) -> tuple[State, Float[Array, "b vocab"]]:
    """`decode_step` before compilation, for loops that are compiled as a whole."""
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
    storage, hidden = read_token(state.weights, state.config, state.policy, state.storage, reading)
    logits = unembed(state.weights, state.config, hidden[:, 0])
    if state.policy.plan.ends:
        logits = jnp.where((state.position < state.end)[:, None], logits, jnp.nan)
    return state.replace(storage=storage, position=after), logits
