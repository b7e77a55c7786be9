"""Beam search in which each beam has its own cache."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.buffers import select_rows
from kvjax.generation.loop import STEPS_PER_DISPATCH
from kvjax.inference.cache import Cache
from kvjax.inference.decoder import Decoder, settle_step
from kvjax.inference.padding import bucket
from kvjax.inference.sharding import unpacked
from kvjax.inference.state import State, take_rows
from kvjax.utils.processes import on_host

NEVER = -1e9
"""Score added to candidates that may not be chosen; transformers uses the same value and order of candidates."""


class Beams(NamedTuple):
    """Running and ended texts of each prompt, both sorted from the highest score."""

    length: Int[Array, ""]
    """Tokens in each running text."""
    score: Float[Array, "b k"]
    """Sum of the log-probabilities of each running text."""
    text: Int[Array, "b k n"]
    ended: Bool[Array, "b k"]
    """True where the next three fields contain an ended text."""
    ended_score: Float[Array, "b k"]
    """Sum of the log-probabilities, divided by the length to the power of the penalty."""
    ended_text: Int[Array, "b k n"]
    ended_length: Int[Array, "b k"]
    open: Bool[Array, " b"]
    """True for prompts with a running text that may still beat an ended one."""


class Found(NamedTuple):
    """The best text of each prompt."""

    tokens: list[list[int]]
    """Ids of each text, excluding the final end id."""
    scores: list[float]
    """Sum of each text's log-probabilities, divided by its length to the power of the penalty."""
    state: State
    """State of all beams that were running at the end."""
    steps: int


def beam_search(
    state: State,
    logits: Float[Array, "b vocab"],
    beams: int,
    max_new_tokens: int,
    eos: tuple[int, ...] = (),
    length_penalty: float = 1.0,
) -> Found:
    """Search for the likeliest texts with several beams, as `num_beams` of transformers does.

    Each step keeps the likeliest continuations of all beams and gives each one a copy of its beam's cache, since
    beams evict different tokens. The search of a prompt ends when no running beam can beat its worst ended text
    (`early_stopping=False` in transformers), or after `max_new_tokens`. If heads have different budgets, every buffer
    gets the size of the largest. Each step gathers all caches, which needs memory for a second copy of them.

    Args:
        state: from `prefill`, as `logits`; it stays valid.
        eos: ids that end a text.
        length_penalty: exponent of the length that divides each score; values above 0 favor long texts.
    """
    if state.policy.plan.sizing.host_memory:
        raise ValueError(
            "a beam search gathers rows of all caches at each step, but memory='host' keeps prompts in host memory; "
            "leave beams or memory out."
        )
    if state.cache.pool is not None:  # pages are counted on the host
        state = State(state.decoder, unpacked(state.cache, state.mesh))
    rows, vocabulary = logits.shape
    state = take_rows(state, np.repeat(np.arange(rows), beams))
    shape, wide = (rows, beams), jnp.promote_types(logits.dtype, jnp.float32)
    text = jnp.zeros((*shape, bucket(max_new_tokens)), jnp.int32)
    search = Beams(
        length=jnp.int32(0),
        score=jnp.broadcast_to(jnp.where(jnp.arange(beams) > 0, NEVER, 0.0).astype(wide), shape),
        text=text,
        ended=jnp.zeros(shape, bool),
        ended_score=jnp.full(shape, NEVER, wide),
        ended_text=text,
        ended_length=jnp.zeros(shape, jnp.int32),
        open=state.active.reshape(shape)[:, 0],
    )
    ends = jnp.asarray(np.isin(np.arange(vocabulary), eos))
    # Enough candidates that at least `beams` of them do not end their text.
    candidates = min(max(2, 1 + len(eos)) * beams, beams * vocabulary)
    decoder, cache = state.decoder, state.cache.replace(key=None)
    settle_step(decoder, cache)
    logits, limits = jnp.repeat(logits, beams, axis=0), (STEPS_PER_DISPATCH, max_new_tokens, float(length_penalty))
    while bool(search.open.any()) and int(search.length) < max_new_tokens:
        cache, logits, search = _search(decoder, cache, logits, search, ends, *limits, candidates=candidates)
    best, lengths = on_host(search.ended_text[:, 0]), on_host(search.ended_length[:, 0])
    tokens = [row[:length].tolist() for row, length in zip(best, lengths, strict=True)]
    tokens = [row[:-1] if row and row[-1] in eos else row for row in tokens]
    scores = on_host(search.ended_score[:, 0]).tolist()
    return Found(tokens, scores, State(decoder, cache.replace(key=state.key)), int(search.length))


@functools.partial(jax.jit, static_argnames="candidates", donate_argnums=1)
def _search(
    decoder: Decoder,
    cache: Cache,
    logits: Float[Array, "bk vocab"],
    beams: Beams,
    ends: Bool[Array, " vocab"],
    steps: int,
    max_new_tokens: int,
    length_penalty: float,
    *,
    candidates: int,
) -> tuple[Cache, Float[Array, "bk vocab"], Beams]:
    until = jnp.minimum(beams.length + steps, max_new_tokens)

    def more(carry: Any) -> Bool[Array, ""]:
        return carry[2].open.any() & (carry[2].length < until)

    def one(carry: Any) -> Any:
        cache, logits, beams = carry
        beams, parent = _select(beams, logits, ends, max_new_tokens, length_penalty, candidates)
        rows, width = parent.shape
        index = (parent + width * jnp.arange(rows)[:, None]).reshape(-1)
        token = jnp.take(beams.text, beams.length - 1, axis=2).reshape(-1)
        return *decoder.step(cache.replace(layers=select_rows(cache.layers, index)), token), beams

    return jax.lax.while_loop(more, one, (cache, logits, beams))


def _select(
    beams: Beams,
    logits: Float[Array, "bk vocab"],
    ends: Bool[Array, " vocab"],
    max_new_tokens: int | Array,
    length_penalty: float | Array,
    candidates: int,
) -> tuple[Beams, Int[Array, "b k"]]:
    """Extend each beam by one token, and return the beams with the parent index of each."""
    rows, width = beams.score.shape
    length = beams.length + 1
    totals = jax.nn.log_softmax(logits.astype(beams.score.dtype)).reshape(rows, width, -1) + beams.score[..., None]
    score, place = jax.lax.top_k(totals.reshape(rows, -1), candidates)
    parent, token = place // totals.shape[-1], (place % totals.shape[-1]).astype(jnp.int32)
    text = _gather(beams.text, parent).at[:, :, beams.length].set(token)
    ending = ends[token] | (length >= max_new_tokens)
    running, chosen = jax.lax.top_k(score + jnp.where(ending, NEVER, 0.0), width)

    divisor = length.astype(score.dtype) ** length_penalty
    # A text ends only if it is among the best `width` candidates; the others are running candidates.
    enters = ending & (jnp.arange(candidates) < width) & beams.open[:, None]
    scores = jnp.concatenate([beams.ended_score, jnp.where(enters, score / divisor, NEVER)], axis=1)
    ended_score, best = jax.lax.top_k(scores, width)
    lengths = jnp.concatenate([beams.ended_length, jnp.broadcast_to(length, enters.shape)], axis=1)
    ended = _gather(jnp.concatenate([beams.ended, enters], axis=1), best)
    worst = jnp.where(ended, ended_score.min(1, keepdims=True), NEVER)
    after = Beams(
        length=length,
        score=running,
        text=_gather(text, chosen),
        ended=ended,
        ended_score=ended_score,
        ended_text=_gather(jnp.concatenate([beams.ended_text, text], axis=1), best),
        ended_length=_gather(lengths, best),
        open=beams.open & (running[:, :1] / divisor > worst).any(1) & ~ending.all(1),
    )
    return after, _gather(parent, chosen)


def _gather(leaf: Array, index: Int[Array, "b m"]) -> Array:
    return jnp.take_along_axis(leaf, index.reshape(*index.shape, *(1,) * (leaf.ndim - 2)), axis=1)
