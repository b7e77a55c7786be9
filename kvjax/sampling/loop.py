"""The compiled loop: many decode steps and draws per dispatch, each row on its own randomness."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.engine.decode import step
from kvjax.engine.state import Moving, State, join_state, split_state
from kvjax.sampling.sample import Sampling, sample

STEPS_PER_DISPATCH = 16

Carry = tuple[Moving, Int[Array, " b"], Int[Array, "b n"]]
"""What a step changes, the token that comes next, and those that were made."""


@jax.jit
def draw(
    key: Key[Array, " b"], position: Int[Array, " b"], logits: Float[Array, "b vocab"], sampling: Sampling
) -> Int[Array, " b"]:
    """The next token of each row, whose randomness is that of the row's key and the token's position alone."""
    return sample(logits, jax.vmap(jax.random.fold_in)(key, position), sampling)


@functools.partial(jax.jit, static_argnames="most", donate_argnums=1)
def _many(
    fixed: State, moving: Moving, token: Int[Array, " b"], sampling: Sampling, steps: int, most: int
) -> tuple[Moving, Int[Array, " b"], Int[Array, "b n"]]:
    # As many steps as there are tokens to make, of `most` that there is room for: another number takes no new program.
    def one(i: Array, carry: Carry) -> Carry:
        moving, token, made = carry
        state, logits = step(join_state(fixed, moving), token)
        token = draw(state.key, state.position, logits, sampling)
        return split_state(state)[1], token, made.at[:, i].set(token)

    made = jnp.zeros((token.shape[0], most), token.dtype)
    return jax.lax.fori_loop(0, steps, one, (moving, token, made))


def generate_tokens(
    state: State,
    logits: Float[Array, "b vocab"],
    max_new_tokens: int,
    sampling: Sampling,
    eos: tuple[int, ...] = (),
    steps: int = STEPS_PER_DISPATCH,
) -> Iterator[tuple[Int[np.ndarray, "b n"], Bool[np.ndarray, "b n"], State]]:
    """Continue prompts in blocks of up to `steps` tokens.

    Args:
        state: from `prefill`; its caches are consumed.
        logits: for the first new token, from `prefill`.
        max_new_tokens: tokens per row, at least 1.
        sampling: how tokens are drawn; other settings take the same program.
        eos: ids that end a row; the rest of the row is masked.
        steps: decode steps per dispatch, at most; the same program serves all of them.

    Yields:
        Tokens, which of them belong to their row's text (an ending id does not, nor what an inactive row is given), and
        the state after them.
    """
    token = draw(state.key, state.position, logits, sampling)
    fixed, moving = split_state(state)
    ended = np.isin(np.asarray(token), eos) | ~np.asarray(state.active)
    yield np.asarray(token)[:, None], ~ended[:, None], state
    made = 1
    while made < max_new_tokens and not ended.all():
        count = min(steps, max_new_tokens - made)
        moving, token, block = _many(fixed, moving, token, sampling, count, steps)
        tokens = np.asarray(block)[:, :count]
        ended_by = np.logical_or.accumulate(np.isin(tokens, eos), axis=1) | ended[:, None]
        ended = ended_by[:, -1]
        made += tokens.shape[1]
        yield tokens, ~ended_by, join_state(fixed, moving)
