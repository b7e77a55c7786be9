"""Speculative decoding: a small cache drafts tokens, and the full cache verifies them in one pass.

The draft and the full cache draw with the same random numbers, so the draft guesses the token itself and not only its
distribution: texts are those of the full cache alone with the same seed, under all sampling settings.
"""

from __future__ import annotations

import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.generation.loop import (
    STEPS_PER_DISPATCH,
    Dispatch,
    Drawn,
    PrefilledBatch,
    Running,
    draw,
    draw_many,
    token_buffers,
)
from kvjax.generation.sampling import GREEDY, Sampling
from kvjax.inference.refresh import truncate_draft
from kvjax.inference.speculation import Speculation, SpeculativeCache, verify_drafts
from kvjax.inference.state import State
from kvjax.utils.modes import on_the_host
from kvjax.utils.processes import on_host


class Round(NamedTuple):
    """What one draft and its verification add to the texts."""

    cache: SpeculativeCache
    in_text: Bool[Array, "b vocab"]
    """True for tokens in each row's text, these included."""
    samples: Drawn
    """Tokens drawn from the full cache's logits, [b g+1], of which `counts` belong to the text."""
    counts: Int[Array, " b"]


def draft_and_verify(
    speculation: Speculation,
    cache: SpeculativeCache,
    key: Key[Array, " b"],
    token: Int[Array, " b"],
    in_text: Bool[Array, "b vocab"],
    ends: Bool[Array, " vocab"],
    sampling: Sampling,
    room: Int[Array, " b"],
    logprobs: int | None = None,
) -> Round:
    """Guess tokens by the draft, read them in one pass by the full cache, and keep those that it draws, too.

    Where a guess is wrong, the full cache's own token takes its place; if none is, one more follows the last guess.

    Args:
        key: random key of each row, in place of the cache's own.
        token: newest token of each row, which the caches have not read.
        ends: True for tokens that end a row's text, after which none is kept.
        room: most tokens that may follow in each row; rows without room do not change.
        logprobs: as in `draw`.
    """
    room = jnp.minimum(room, cache.end - cache.position)
    active, place = cache.active & (room > 0), jnp.arange(speculation.draft_tokens + 1)

    def guess(texts: tuple[Array, Array], logits: Float[Array, "b vocab"]) -> tuple[tuple[Array, Array], Array]:
        position, in_text = texts
        drawn, in_text = draw(key, position, logits, sampling, in_text)
        return (position + 1, in_text), drawn.token

    verified = verify_drafts(speculation, cache, token, active, (cache.position + 1, in_text), guess)

    def confirm(in_text: Bool[Array, "b vocab"], number: Int[Array, ""]) -> tuple[Bool[Array, "b vocab"], Drawn]:
        logits = verified.logits[:, number]
        drawn, in_text = draw(key, cache.position + 1 + number, logits, sampling, in_text, logprobs)
        return in_text, drawn

    _, drawn = jax.lax.scan(confirm, in_text, place)
    samples: Drawn = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), drawn)
    goes_on = (samples.token[:, :-1] == verified.guesses) & ~ends[samples.token[:, :-1]]
    counts = jnp.where(active, jnp.minimum(1 + jnp.cumprod(goes_on, axis=1).sum(1, dtype=jnp.int32), room), 0)
    in_text = in_text.at[jnp.arange(len(token))[:, None], samples.token].max(place < counts[:, None])
    return Round(verified.keep(counts), in_text, samples, counts)


@on_the_host
def speculate(
    speculation: Speculation,
    cache: SpeculativeCache,
    token: Int[Array, " b"],
    sampling: Sampling | None = None,
    in_text: Bool[Array, "b vocab"] | None = None,
) -> tuple[SpeculativeCache, Int[Array, "b n"], Int[Array, " b"]]:
    """Draft tokens on the small cache, verify them on the full one, and return those that the full one draws.

    The function is pure and compiled, and it works under `jit` and `scan`. The tokens are those that steps of the full
    cache alone would draw with the same keys, but for ties of rounded logits.

    Args:
        speculation: from `kvjax.speculation`.
        cache: from its `prefill`, or from an earlier call; it stays valid.
        token: newest token of each row, which the caches have not read; at first one of the prompt's logits.
        sampling: sampling settings; None for greedy decoding.
        in_text: True for tokens in each row's text, for a repetition penalty.

    Returns:
        The caches after all new tokens but the newest one of each row; the tokens [b, draft_tokens + 1]; and how many
        of them follow in each row: at least one, unless the row is not active or its planned length is reached.

    Example:
        >>> import jax.numpy as jnp
        >>> model = kvjax.load("tiny")
        >>> speculation = kvjax.speculation(model, "streaming", budget=8, draft_tokens=3)
        >>> cache, logits = speculation.prefill([[5, 17, 42], [8]], max_new_tokens=20)
        >>> token = logits.argmax(-1)
        >>> for _ in range(3):
        ...     cache, tokens, counts = kvjax.speculate(speculation, cache, token)
        ...     token = tokens[jnp.arange(2), counts - 1]
        >>> (cache.position >= jnp.array([6, 4])).tolist()
        [True, True]
    """
    after, tokens, counts = _compiled_round(
        speculation.for_steps(),
        cache.replace(key=None),
        cache.key,
        jnp.asarray(token, jnp.int32),
        sampling or Sampling(**GREEDY),
        jnp.zeros((len(cache.active), speculation.config.vocab_size), bool) if in_text is None else in_text,
    )
    return after.replace(key=cache.key), tokens, counts


@jax.jit
def _compiled_round(
    speculation: Speculation,
    cache: SpeculativeCache,
    key: Key[Array, " b"],
    token: Int[Array, " b"],
    sampling: Sampling,
    in_text: Bool[Array, "b vocab"],
) -> tuple[SpeculativeCache, Int[Array, "b n"], Int[Array, " b"]]:
    ends, room = jnp.zeros(in_text.shape[1], bool), cache.end - cache.position
    after, _, samples, counts = draft_and_verify(speculation, cache, key, token, in_text, ends, sampling, room)
    return after, samples.token, counts


@functools.partial(jax.jit, static_argnames="logprobs", donate_argnums=(1, 4))
def draw_rounds(
    speculation: Speculation,
    cache: SpeculativeCache,
    key: Key[Array, " b"],
    token: Int[Array, " b"],
    in_text: Bool[Array, "b vocab"],
    ends: Bool[Array, " vocab"],
    sampling: Sampling,
    room: Int[Array, " b"],
    rounds: int,
    logprobs: int | None,
) -> tuple[SpeculativeCache, Bool[Array, "b vocab"], Drawn, Int[Array, " b"], Int[Array, " b"]]:
    """Run up to `rounds` rounds in one program, or fewer if all rows have ended or have no room.

    Returns:
        The caches, `in_text`, tokens [b n] of which each row has as many as its entry in the next array [b], and the
        number of rounds that each row took part in.
    """
    rows, width = jnp.arange(len(token)), max(STEPS_PER_DISPATCH, speculation.draft_tokens + 1)
    places = jnp.arange(speculation.draft_tokens + 1)

    def more(carry: Any) -> Bool[Array, ""]:
        i, cache, _, _, _, counts, _, ended = carry
        return (i < rounds) & (cache.active & ~ended & (counts < room)).any()

    def one(carry: Any) -> Any:
        i, cache, token, in_text, out, counts, taken, ended = carry
        free = jnp.where(ended, 0, room - counts)
        after, in_text, samples, new = draft_and_verify(
            speculation, cache, key, token, in_text, ends, sampling, free, logprobs
        )
        at = jnp.where(places < new[:, None], counts[:, None] + places, width)
        out = jax.tree.map(lambda all, some: all.at[rows[:, None], at].set(some, mode="drop"), out, samples)
        newest = jnp.where(new > 0, samples.token[rows, jnp.maximum(new - 1, 0)], token)
        return i + 1, after, newest, in_text, out, counts + new, taken + (new > 0), ended | (ends[newest] & (new > 0))

    none = jnp.zeros(len(token), jnp.int32)
    out = token_buffers((len(token), width), speculation.weights.dtype, logprobs)
    start = jnp.int32(0), cache, token, in_text, out, none, none, jnp.zeros(len(token), bool)
    _, cache, _, in_text, out, counts, taken, _ = jax.lax.while_loop(more, one, start)
    return cache, in_text, out, counts, taken


class SpeculativeBatch(PrefilledBatch):
    """Prefilled prompts, with two caches, and the settings for their continuation."""

    def dispatch(self, state: State, texts: Running, steps: int) -> Dispatch:
        decoder, cache = parts_of(state)
        rounds = max(steps // (decoder.draft_tokens + 1), 1)
        of_rows = state.key, *texts[:3], self.sampling, jnp.asarray(texts.room, jnp.int32)
        cache, in_text, samples, *numbers = draw_rounds(
            decoder, cache.replace(key=None), *of_rows, rounds, self.logprobs
        )
        counts, taken = map(on_host, numbers)
        return Dispatch(State(decoder, cache.replace(key=state.key)), in_text, samples, counts, taken)

    def cut(self, state: State, surplus: Int[np.ndarray, " b"]) -> State:
        if not isinstance(state.cache, SpeculativeCache):
            return super().cut(state, surplus)
        decoder, cache = parts_of(state)
        length = on_host(cache.position) - surplus
        if not surplus.any() or not all(layer.rewinds for layer in cache.layers):
            return state
        if (length < on_host(cache.draft.position)).any():
            if not decoder.refresh:
                # Tokens that the draft has read stay, as those of several steps of a cache that evicts.
                return state
            cache = cache.replace(draft=_truncated_draft(cache.draft, jnp.asarray(length)))
        return State(decoder, _truncated(cache.replace(key=None), jnp.asarray(length)).replace(key=cache.key))


def full_tokens_per_second(state: State) -> float:
    """Time decode steps of the full cache alone, of a state with a draft; return the tokens of all rows per second.

    The full cache's layers are consumed, because a copy of them could be more than there is memory.
    """
    full, cache = state.decoder.decoders[0], state.cache.caches[0].with_own_rows().replace(key=None)
    rows, vocabulary, seconds = len(state.position), state.config.vocab_size, 0.0
    for _ in range(2):  # the first time may include compilation
        texts = jnp.zeros(rows, jnp.int32), jnp.zeros((rows, vocabulary), bool), jnp.zeros(rows, bool)
        settings = jnp.zeros(vocabulary, bool), Sampling(**GREEDY), STEPS_PER_DISPATCH, None
        began = time.perf_counter()
        steps, cache, *_ = draw_many(full, cache, state.key, *texts, *settings)
        jax.block_until_ready(steps)
        seconds = time.perf_counter() - began
    return int(on_host(state.active).sum()) * STEPS_PER_DISPATCH / seconds


_truncated, _truncated_draft = jax.jit(SpeculativeCache.truncate), jax.jit(truncate_draft)


def parts_of(state: State) -> tuple[Speculation, SpeculativeCache]:
    """Return the decoder and the cache of a state with a draft."""
    assert isinstance(state.decoder, Speculation) and isinstance(state.cache, SpeculativeCache)
    return state.decoder, state.cache
