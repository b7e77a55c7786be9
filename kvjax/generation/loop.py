"""The compiled decode loop: many steps and samples per dispatch, with a random key per row."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.generation.detokenize import Pieces
from kvjax.generation.sampling import Sampling, sample
from kvjax.inference.cache import Cache
from kvjax.inference.decoder import Decoder, settle_step
from kvjax.inference.state import State
from kvjax.utils.modes import each_on_the_host
from kvjax.utils.processes import on_host

if TYPE_CHECKING:
    from kvjax.models.model import LanguageModel

STEPS_PER_DISPATCH = 16


class Drawn(NamedTuple):
    """Sampled tokens of each row, [b] or [b n], with their log-probabilities before filters and penalties."""

    token: Int[Array, " b"]
    logprob: Float[Array, " b"] | None
    """Log-probability of the token; None if not requested, as in the next two fields."""
    likeliest: Int[Array, "b k"] | None
    """The k likeliest tokens at this position, the likeliest first."""
    likeliest_logprob: Float[Array, "b k"] | None


class Running(NamedTuple):
    """Texts that a dispatch continues."""

    token: Int[Array, " b"]
    """Newest token of each row, which no cache has read."""
    in_text: Bool[Array, "b vocab"]
    """True for tokens in each row's text."""
    ends: Bool[Array, " vocab"]
    """True for tokens that end a text."""
    room: Int[np.ndarray, " b"]
    """Tokens that may follow in each row; 0 for rows that have ended."""


class Dispatch(NamedTuple):
    """Tokens that one program has drawn."""

    state: State
    in_text: Bool[Array, "b vocab"]
    samples: Drawn
    """Tokens of the dispatch, [b n]."""
    counts: Int[np.ndarray, " b"]
    """Tokens of each row; the others are padding."""
    rounds: Int[np.ndarray, " b"]
    """Verifications that each row took part in; 0 without a draft."""


class Block(NamedTuple):
    """Tokens of one dispatch."""

    tokens: Int[np.ndarray, "b n"]
    belongs: Bool[np.ndarray, "b n"]
    """True for tokens of their row's text; False for end ids, for padding, and for tokens of inactive rows."""
    state: State
    """State after the block; it has not read the last token of a running row yet."""
    samples: Drawn
    """Tokens of the block with their log-probabilities, [b n] and [b n k] on the host."""
    counts: Int[np.ndarray, " b"]
    """Tokens that were drawn for each row; the others are padding."""
    rounds: Int[np.ndarray, " b"]
    """Verifications that each row took part in; 0 without a draft."""


@functools.partial(jax.jit, static_argnames="logprobs")
def draw(
    key: Key[Array, " b"],
    position: Int[Array, " b"],
    logits: Float[Array, "b vocab"],
    sampling: Sampling,
    in_text: Bool[Array, "b vocab"],
    logprobs: int | None = None,
) -> tuple[Drawn, Bool[Array, "b vocab"]]:
    """Sample the next token of each row, with randomness that depends only on the row's key and the position.

    Returns:
        The tokens, with log-probabilities of them and of the `logprobs` likeliest ones unless that is None; and the
        updated `in_text`.
    """
    token = sample(logits, jax.vmap(jax.random.fold_in)(key, position), sampling, in_text)
    in_text = in_text.at[jnp.arange(len(token)), token].set(True)
    return (Drawn(token, None, None, None) if logprobs is None else token_logprobs(logits, token, logprobs)), in_text


def token_logprobs(logits: Float[Array, "b vocab"], token: Int[Array, " b"], logprobs: int) -> Drawn:
    """Return tokens with their log-probabilities, and the `logprobs` likeliest tokens with their log-probabilities."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
    values, ids = jax.lax.top_k(log_probs, logprobs) if logprobs else (None, None)
    return Drawn(token, jnp.take_along_axis(log_probs, token[:, None], axis=1)[:, 0], ids, values)


def token_buffers(shape: tuple[int, int], dtype: DTypeLike, logprobs: int | None) -> Drawn:
    """Allocate the buffers for tokens of `shape`, which is rows and steps; `dtype` is the model's."""
    wide = jnp.promote_types(dtype, jnp.float32)
    return Drawn(
        jnp.zeros(shape, jnp.int32),
        None if logprobs is None else jnp.zeros(shape, wide),
        jnp.zeros((*shape, logprobs), jnp.int32) if logprobs else None,
        jnp.zeros((*shape, logprobs), wide) if logprobs else None,
    )


@functools.partial(jax.jit, static_argnames="logprobs", donate_argnums=(1, 4))
def draw_many(
    decoder: Decoder,
    cache: Cache,
    key: Key[Array, " b"],
    token: Int[Array, " b"],
    in_text: Bool[Array, "b vocab"],
    ended: Bool[Array, " b"],
    ends: Bool[Array, " vocab"],
    sampling: Sampling,
    steps: int,
    logprobs: int | None,
) -> tuple[Array, Cache, Bool[Array, "b vocab"], Drawn]:
    """Draw up to `steps` tokens per row in one program, or fewer if all rows end."""

    # The buffers have room for the most steps and `steps` is an argument, so all numbers of steps share one program.
    # Rows that have ended read no more tokens, so a conversation can continue from its answer.
    def more(carry: Any) -> Bool[Array, ""]:
        i, _, _, _, ended, _ = carry
        return (i < steps) & ~ended.all()

    def one(carry: Any) -> Any:
        i, cache, token, in_text, ended, out = carry
        after, logits = decoder.step(cache.replace(active=cache.active & ~ended), token)
        samples, in_text = draw(key, after.position, logits, sampling, in_text, logprobs)
        out = jax.tree.map(lambda all, new: all.at[:, i].set(new), out, samples)
        after = after.replace(active=cache.active)
        return i + 1, after, samples.token, in_text, ended | ends[samples.token], out

    out = token_buffers((token.shape[0], STEPS_PER_DISPATCH), decoder.weights.dtype, logprobs)
    i, cache, _, in_text, _, out = jax.lax.while_loop(more, one, (jnp.int32(0), cache, token, in_text, ended, out))
    return i, cache, in_text, out


@dataclasses.dataclass
class PrefilledBatch:
    """Prefilled prompts, with the settings for their continuation."""

    model: LanguageModel
    prompts: list[list[int]]
    """Prompt ids of each active row."""
    state: State
    logits: Float[Array, "b vocab"]
    cache_positions: list[np.ndarray]
    max_new_tokens: int
    sampling: Sampling
    eos: tuple[int, ...]
    stop: tuple[str, ...]
    logprobs: int | None
    compile_seconds: float
    seconds: float
    """Time of prefill, without compilation."""

    @each_on_the_host
    def blocks(self, steps: int = STEPS_PER_DISPATCH) -> Iterator[Block]:
        """Yield blocks of up to `steps` new tokens, at most 16; this consumes the caches, so call it only once."""
        state, logits, rows, limit = self.state, self.logits, len(self.prompts), self.max_new_tokens
        in_text, ends = np.zeros(logits.shape, bool), np.isin(np.arange(logits.shape[1]), self.eos)
        for row, ids in zip(in_text, self.prompts, strict=False):  # rows beyond them only fill the batch
            row[ids] = True
        pieces = [Pieces(self.model.tokenizer, self.stop, prompt) for prompt in self.prompts] if self.stop else []
        settle_step(state.decoder, state.cache)
        samples, in_text = draw(state.key, state.position, logits, self.sampling, jnp.asarray(in_text), self.logprobs)
        ended, length, none = ~on_host(state.active), np.zeros(len(logits), int), np.zeros(len(logits), int)
        first: Drawn = jax.tree.map(lambda leaf: leaf[:, None], samples)
        dispatch = Dispatch(State(state.decoder, state.cache.with_own_rows()), in_text, first, none + 1, none)
        token = on_host(samples.token)
        while True:
            counts, most = dispatch.counts, int(dispatch.counts.max())
            block: Drawn = jax.tree.map(lambda leaf, most=most: on_host(leaf)[:, :most], dispatch.samples)
            tokens, filled = np.asarray(block.token), np.arange(most) < counts[:, None]
            is_end = ends[tokens] & filled
            belongs = filled & ~(np.logical_or.accumulate(is_end, axis=1) | ended[:, None])
            length, ended = length + counts, ended | is_end.any(1)
            for row, detokenizer in enumerate(pieces):  # a text includes the token that completes its stop string
                places, used = np.flatnonzero(belongs[row]), detokenizer.used
                detokenizer.add(tokens[row, places].tolist())
                belongs[row, places[detokenizer.used - used :]] = False
                ended[row] |= detokenizer.stopped
            surplus = np.where(is_end.any(1) | ~ended, 0, counts - belongs.sum(1))
            after, of_rows = self.cut(dispatch.state, surplus), jax.tree.map(lambda leaf: leaf[:rows], block)
            yield Block(tokens[:rows], belongs[:rows], after, of_rows, counts[:rows], dispatch.rounds[:rows])
            room = np.where(ended, 0, limit - length)
            if not room.any():
                return
            ended |= room == 0
            newest = np.take_along_axis(tokens, np.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
            token = np.where(counts > 0, newest, token)
            texts = Running(jnp.asarray(token), dispatch.in_text, jnp.asarray(ends), room)
            dispatch = self.dispatch(after, texts, min(steps, STEPS_PER_DISPATCH))

    def dispatch(self, state: State, texts: Running, steps: int) -> Dispatch:
        """Draw up to `steps` tokens of each row in one program; caches and `in_text` are consumed."""
        token, in_text, ends, room = texts
        settings = ends, self.sampling, min(steps, int(room[room > 0].min())), self.logprobs
        rows = state.key, token, in_text, jnp.asarray(room == 0)
        done, cache, in_text, samples = draw_many(state.decoder, state.cache.replace(key=None), *rows, *settings)
        none = np.zeros(len(room), int)
        return Dispatch(State(state.decoder, cache.replace(key=state.key)), in_text, samples, none + int(done), none)

    def cut(self, state: State, surplus: Int[np.ndarray, " b"]) -> State:
        """Return a state without the `surplus` tokens of rows that a stop string has ended before them.

        Caches that evict cannot go back, and keep what a dispatch of several tokens has read.
        """
        return state

    def pieces(self) -> Iterator[tuple[Block | None, str]]:
        """Yield each new token of one text with the text that becomes certain, and None with the last piece."""
        pieces = Pieces(self.model.tokenizer, self.stop, self.prompts[0])
        for block in self.blocks(steps=1):
            yield block, pieces.add(block.tokens[0][block.belongs[0]].tolist())
        yield None, pieces.finish()
