"""Texts that are read again over a cache: their tokens attend and get no slots. Scores or queries are kept of them."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.dense import Dense
from kvjax.cache.step import Pending, sum_over_layers, update_score
from kvjax.inference.cache import Bound, Cache
from kvjax.inference.layers import append_and_attend
from kvjax.inference.padding import bucket
from kvjax.inference.prepare import longest_text
from kvjax.inference.sharding import OF_HEADS, joined, run_on_mesh, shared, storage_specs
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import embed
from kvjax.policies.policy import Policy
from kvjax.policies.score import Replay
from kvjax.policies.stats import Seen, is_ask
from kvjax.types import Reading
from kvjax.utils.processes import on_host

LEAST = 32
"""Fewest positions that must be left to read a chunk of a longer text."""


def read_again(decoder: Bound, cache: Cache, tokens: Int[np.ndarray, "b n"], lengths: Int[np.ndarray, " b"]) -> Cache:
    """Read texts, padded on the right, again over a dense cache, as the score's `Requirements.replay` says.

    Each chunk of a text comes after the replay's request, at the positions that follow the cache's own text, of which
    the model must have enough. Neither is kept for the next chunk.
    """
    replay = decoder.policy.score.requires.replay
    assert replay is not None
    sizes = _chunks(replay, decoder.policy, on_host(cache.position), lengths, decoder.config)
    width = bucket(replay.most_before + int(sizes.max()))
    for number in range(int(np.max(-(-lengths // sizes)))):
        ids, counts = np.zeros((len(tokens), width), np.int32), np.zeros(len(tokens), np.int32)
        for row, size in enumerate(sizes.tolist()):
            start, end = number * size, min((number + 1) * size, int(lengths[row]))
            if start < end:
                text = replay.before(tokens[row, :start].tolist()) + tokens[row, start:end].tolist()
                ids[row, : len(text)], counts[row] = text, len(text)
        texts = jnp.asarray(ids), jnp.asarray(counts)
        cache = cache.replace(storage=_read(decoder, cache, *texts))
    return cache


def _chunks(
    replay: Replay, policy: Policy, read: Int[np.ndarray, " b"], lengths: Int[np.ndarray, " b"], config: ModelConfig
) -> Int[np.ndarray, " b"]:
    # The tokens of each row's chunks, by its own length alone.
    wanted = np.maximum(np.minimum(replay.chunk, lengths), 1)
    if longest_text(policy, config) == math.inf:
        return wanted
    room = config.max_positions - read - replay.most_before
    if (room < np.minimum(wanted, LEAST)).any():
        raise ValueError(
            f"policy {policy.name} reads a text of {int(read.max())} tokens again at the positions after it, and the "
            f"model has {config.max_positions}; use a text of at most "
            f"{max(config.max_positions - replay.most_before - LEAST, 0)} tokens."
        )
    return np.minimum(wanted, room)


@jax.jit
def _read(decoder: Bound, cache: Cache, tokens: Int[Array, "b n"], lengths: Int[Array, " b"]) -> Dense:
    def here(decoder: Bound, cache: Cache, tokens: Array, lengths: Array) -> Dense:
        reading = cache.following(tokens, lengths).replace(replayed=True, kernels=decoder.kernels)
        storage: Dense = joined(cache.storage, decoder.mesh)
        found = _told(decoder.here(), storage, reading)
        of_cache = [_of_cache(told, view.capacity) for told, view in zip(found, storage.layers, strict=True)]
        for index, told in enumerate(sum_over_layers(of_cache)):
            storage = update_score(decoder.policy.layer(index), storage, index, *told)
        return shared(storage, decoder.mesh)

    return run_on_mesh(here, decoder, cache, tokens, lengths, out_specs=lambda: storage_specs(cache.storage))


@jax.jit
def replayed_queries(
    decoder: Bound, cache: Cache, tokens: Int[Array, "b n"], lengths: Int[Array, " b"]
) -> tuple[Float[Array, "b h g n d"], ...]:
    """Return each layer's queries of a text that is read on top of a cache, with the arguments of `read_again`."""

    def here(decoder: Bound, cache: Cache, tokens: Array, lengths: Array) -> tuple[Array, ...]:
        reading = cache.following(tokens, lengths)
        reading = reading.replace(prompt_length=reading.read, kernels=decoder.kernels)
        storage: Dense = joined(cache.storage, decoder.mesh).unpack()
        return tuple(told.new.q for told in _told(decoder.here(), storage, reading))

    return run_on_mesh(here, decoder, cache, tokens, lengths, out_specs=lambda: OF_HEADS)


def _told(decoder: Bound, storage: Dense, reading: Reading) -> list[Pending]:
    # Each layer's attention statistics and tokens, from a text that follows the cache and gets no slots in it.
    x, found = embed(decoder.weights, decoder.config, reading.token, reading.position), list[Pending]()
    for index, layer in enumerate(decoder.layers):
        _, told, x = append_and_attend(layer, storage.alone(index), 0, reading, x)
        found.append(told)
    return found


def _of_cache(told: Pending, slots: int) -> Pending:
    # The score's statistics of the slots of the cache, without those of the tokens that are read again.
    def cut(_: Any, found: Any) -> Any:
        if isinstance(found, Seen):
            return found._replace(probs=found.probs[..., :slots], seen=found.seen[..., :slots])
        return found[..., :slots]

    asks = told.asks["score"]
    return Pending(asks, jax.tree.map(cut, asks, told.answers["score"], is_leaf=is_ask), told.new)
