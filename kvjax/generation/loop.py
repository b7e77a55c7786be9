"""The compiled decode loop: many steps and samples per dispatch, with a random key per row."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.generation.detokenize import Stops
from kvjax.generation.sampling import Sampling, sample
from kvjax.inference.cache import Cache
from kvjax.inference.decoder import Decoder, settle_step
from kvjax.inference.state import State
from kvjax.utils.processes import on_host

STEPS_PER_DISPATCH = 16


class Drawn(NamedTuple):
    """Sampled tokens of each row, [b] or [b n], with their log-probabilities before filters and penalties."""

    token: Int[Array, " b"]
    logprob: Float[Array, " b"] | None
    """Log-probability of the token; None if not requested, as in the next two fields."""
    likeliest: Int[Array, "b k"] | None
    """The k likeliest tokens at this position, the likeliest first."""
    likeliest_logprob: Float[Array, "b k"] | None


class Block(NamedTuple):
    """Tokens of one dispatch."""

    tokens: Int[np.ndarray, "b n"]
    belongs: Bool[np.ndarray, "b n"]
    """True for tokens of their row's text; False for end ids and for tokens of inactive rows."""
    state: State
    """State after the block; it has not read the last token of a running row yet."""
    drawn: Drawn
    """Tokens of the block with their log-probabilities, [b n] and [b n k] on the host."""


@functools.partial(jax.jit, static_argnames="logprobs")
def draw(
    key: Key[Array, " b"],
    position: Int[Array, " b"],
    logits: Float[Array, "b vocab"],
    sampling: Sampling,
    seen: Bool[Array, "b vocab"],
    logprobs: int | None = None,
) -> tuple[Drawn, Bool[Array, "b vocab"]]:
    """Sample the next token of each row, with randomness that depends only on the row's key and the position.

    Returns:
        The tokens, with log-probabilities of them and of the `logprobs` likeliest ones unless that is None; and the
        updated `seen`.
    """
    token = sample(logits, jax.vmap(jax.random.fold_in)(key, position), sampling, seen)
    seen = seen.at[jnp.arange(len(token)), token].set(True)
    return (Drawn(token, None, None, None) if logprobs is None else token_logprobs(logits, token, logprobs)), seen


def token_logprobs(logits: Float[Array, "b vocab"], token: Int[Array, " b"], logprobs: int) -> Drawn:
    """Return tokens with their log-probabilities, and the `logprobs` likeliest tokens with their log-probabilities."""
    known = jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
    values, ids = jax.lax.top_k(known, logprobs) if logprobs else (None, None)
    return Drawn(token, jnp.take_along_axis(known, token[:, None], axis=1)[:, 0], ids, values)


def token_buffers(shape: tuple[int, int], dtype: DTypeLike, logprobs: int | None) -> Drawn:
    """Allocate the buffers for tokens of `shape`, which is rows and steps; `dtype` is the model's."""
    wide = jnp.promote_types(dtype, jnp.float32)
    return Drawn(
        jnp.zeros(shape, jnp.int32),
        None if logprobs is None else jnp.zeros(shape, wide),
        jnp.zeros((*shape, logprobs), jnp.int32) if logprobs else None,
        jnp.zeros((*shape, logprobs), wide) if logprobs else None,
    )


@functools.partial(jax.jit, static_argnames=("most", "logprobs"), donate_argnums=(1, 4))
def draw_many(
    decoder: Decoder,
    cache: Cache,
    key: Key[Array, " b"],
    token: Int[Array, " b"],
    seen: Bool[Array, "b vocab"],
    ended: Bool[Array, " b"],
    ends: Bool[Array, " vocab"],
    sampling: Sampling,
    steps: int,
    most: int,
    logprobs: int | None,
) -> tuple[Array, Cache, Bool[Array, "b vocab"], Drawn]:
    """Draw up to `steps` tokens per row in one program, or fewer if all rows end."""

    # The buffers have room for `most` tokens and `steps` is an argument, so all numbers of steps share one program.
    # Rows that have ended read no more tokens, so a conversation can continue from its answer.
    def more(carry: Any) -> Bool[Array, ""]:
        i, _, _, _, ended, _ = carry
        return (i < steps) & ~ended.all()

    def one(carry: Any) -> Any:
        i, cache, token, seen, ended, made = carry
        after, logits = decoder.step(cache.replace(active=cache.active & ~ended), token)
        drawn, seen = draw(key, after.position, logits, sampling, seen, logprobs)
        made = jax.tree.map(lambda all, new: all.at[:, i].set(new), made, drawn)
        after = after.replace(active=cache.active)
        return i + 1, after, drawn.token, seen, ended | ends[drawn.token], made

    made = token_buffers((token.shape[0], most), decoder.weights.dtype, logprobs)
    i, cache, _, seen, _, made = jax.lax.while_loop(more, one, (jnp.int32(0), cache, token, seen, ended, made))
    return i, cache, seen, made


def generate_tokens(
    state: State,
    logits: Float[Array, "b vocab"],
    max_new_tokens: int,
    sampling: Sampling,
    eos: tuple[int, ...] = (),
    steps: int = STEPS_PER_DISPATCH,
    *,
    texts: Sequence[Sequence[int]] = (),
    logprobs: int | None = None,
    stops: Stops | None = None,
) -> Iterator[Block]:
    """Continue prompts and yield blocks of up to `steps` tokens.

    Args:
        state: from `prefill`, as `logits`; its caches are consumed.
        sampling: the sampling settings; all of them use the same program.
        eos: ids that end a row; the row reads no more tokens, and the rest of it is masked.
        steps: decode steps per dispatch, at most 16; all numbers of steps use the same program.
        texts: ids of each row so far, for the repetition penalty; rows beyond them have none.
        logprobs: number of likeliest tokens to return with each one, 0 for the token alone; None for no
            log-probabilities.
        stops: called with each block before it is yielded; it may end rows.
    """
    seen, ends = np.zeros(logits.shape, bool), np.isin(np.arange(logits.shape[1]), eos)
    for row, ids in zip(seen, texts, strict=False):
        row[list(ids)] = True
    decoder, cache = state.decoder, state.cache.with_own_rows()
    settle_step(decoder, cache)
    drawn, held = draw(state.key, state.position, logits, sampling, jnp.asarray(seen), logprobs)
    ended, made = ~on_host(state.active), 0
    token, after = drawn.token, state
    found: Drawn = jax.tree.map(lambda leaf: on_host(leaf)[:, None], drawn)
    while True:
        tokens = np.asarray(found.token)
        belongs = ~(np.logical_or.accumulate(ends[tokens], axis=1) | ended[:, None])
        made, ended = made + tokens.shape[1], ~belongs[:, -1]
        if stops is not None:
            belongs, ended = stops(tokens, belongs)
        yield Block(tokens, belongs, after, found)
        if made >= max_new_tokens or ended.all():
            return
        count = min(steps, STEPS_PER_DISPATCH, max_new_tokens - made)
        arguments = token, held, jnp.asarray(ended), jnp.asarray(ends), sampling, count, STEPS_PER_DISPATCH, logprobs
        done, cache, held, drawn = draw_many(decoder, cache.replace(key=None), state.key, *arguments)
        found = jax.tree.map(lambda leaf, done=int(done): on_host(leaf)[:, :done], drawn)
        token, after = jnp.asarray(found.token[:, -1]), State(decoder, cache.replace(key=state.key))
