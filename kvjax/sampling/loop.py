"""The compiled loop: many decode steps and draws per dispatch, each row on its own randomness."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.engine.decode import step
from kvjax.engine.state import Moving, State, join_state, split_state
from kvjax.sampling.sample import Sampling, sample

STEPS_PER_DISPATCH = 16

Carry = tuple[Moving, Int[Array, " b"]]
"""What a step changes, and the token that comes next."""


def draw(state: State, logits: Float[Array, "b vocab"], sampling: Sampling) -> Int[Array, " b"]:
    """The next token of each row; its key depends on the row's key and the token's position, on nothing else."""
    keys = jax.vmap(jax.random.fold_in)(state.key, state.position)
    return sample(logits, keys, sampling)


_draw = jax.jit(draw, static_argnames="sampling")


@functools.partial(jax.jit, static_argnames=("sampling", "steps"), donate_argnums=1)
def _many(
    fixed: State, moving: Moving, token: Int[Array, " b"], sampling: Sampling, steps: int
) -> tuple[Moving, Int[Array, " b"], Int[Array, "b n"]]:
    def one(carry: Carry, _: None) -> tuple[Carry, Int[Array, " b"]]:
        moving, token = carry
        state, logits = step(join_state(fixed, moving), token)
        token = draw(state, logits, sampling)
        return (split_state(state)[1], token), token

    (moving, token), tokens = jax.lax.scan(one, (moving, token), None, length=steps)
    return moving, token, tokens.T


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
        sampling: how tokens are drawn.
        eos: ids that end a row; the rest of the row is masked.
        steps: decode steps per dispatch; the same program serves all of them.

    Yields:
        Tokens, which of them belong to their row's text (an ending id does not), and the state after them.
    """
    token = _draw(state, logits, sampling=sampling)
    fixed, moving = split_state(state)
    ended = np.isin(np.asarray(token), eos)
    yield np.asarray(token)[:, None], ~ended[:, None], state
    made = 1
    while made < max_new_tokens and not ended.all():
        moving, token, block = _many(fixed, moving, token, sampling, steps)
        tokens = np.asarray(block)[:, : max_new_tokens - made]
        ended_by = np.logical_or.accumulate(np.isin(tokens, eos), axis=1) | ended[:, None]
        ended = ended_by[:, -1]
        made += tokens.shape[1]
        yield tokens, ~ended_by, join_state(fixed, moving)
