"""Texts that are read again over a cache: their tokens attend and get no slots. Scores or queries are kept of them."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.layer import LayerCache
from kvjax.cache.pending import Pending, sum_over_layers
from kvjax.inference.cache import Bound, Cache
from kvjax.inference.padding import bucket
from kvjax.inference.prepare import longest_text
from kvjax.inference.sharding import gather_slots, run_on_mesh, scatter_slots
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import begin, block
from kvjax.policies.policy import Policy
from kvjax.policies.score import Replay
from kvjax.policies.stats import Seen, is_request
from kvjax.types import OF_HEADS, TokenBatch
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
        cache = cache.replace(layers=_read(decoder, cache, *texts))
    return cache


def _chunks(
    replay: Replay, policy: Policy, read: Int[np.ndarray, " b"], lengths: Int[np.ndarray, " b"], config: ModelConfig
) -> Int[np.ndarray, " b"]:
    # The tokens of each row's chunks, by its own length alone.
    sizes = np.maximum(np.minimum(replay.chunk, lengths), 1)
    if longest_text(policy, config) == math.inf:
        return sizes
    room = config.max_positions - read - replay.most_before
    if (room < np.minimum(sizes, LEAST)).any():
        raise ValueError(
            f"policy {policy.name} reads a text of {int(read.max())} tokens again at the positions after it, and the "
            f"model has {config.max_positions}; use a text of at most "
            f"{max(config.max_positions - replay.most_before - LEAST, 0)} tokens."
        )
    return np.minimum(sizes, room)


@jax.jit
def _read(decoder: Bound, cache: Cache, tokens: Int[Array, "b n"], lengths: Int[Array, " b"]) -> tuple[LayerCache, ...]:
    def read_layers(decoder: Bound, cache: Cache, tokens: Array, lengths: Array) -> tuple[LayerCache, ...]:
        reading = cache.following(tokens, lengths).replace(replayed=True)
        gathered, decoder = gather_slots(cache, decoder.mesh), decoder.here()
        slots, layers = gathered.slots_by_layer, decoder.layers
        of_cache = map(_of_cache, _pending(decoder, gathered, reading), [view.capacity for view in slots.values()])
        totals = zip(slots.items(), sum_over_layers(list(of_cache)), strict=True)
        updated = {index: view.updated(layers[index].policy, pending) for (index, view), pending in totals}
        return scatter_slots(cache.with_layers(updated), decoder.mesh)

    return run_on_mesh(read_layers, decoder, cache, tokens, lengths, out_specs=lambda: cache.specs.layers)


@jax.jit
def replayed_queries(
    decoder: Bound, cache: Cache, tokens: Int[Array, "b n"], lengths: Int[Array, " b"]
) -> tuple[Float[Array, "b h g n d"], ...]:
    """Return each layer's queries of a text that is read on top of a cache, for layers with slots; see `read_again`."""

    def queries_of_layers(decoder: Bound, cache: Cache, tokens: Array, lengths: Array) -> tuple[Array, ...]:
        reading = cache.following(tokens, lengths)
        reading = reading.replace(prompt_length=reading.read)
        gathered = gather_slots(cache, decoder.mesh)
        return tuple(pending.new.q for pending in _pending(decoder.here(), gathered, reading))

    return run_on_mesh(queries_of_layers, decoder, cache, tokens, lengths, out_specs=lambda: OF_HEADS)


def _pending(decoder: Bound, cache: Cache, reading: TokenBatch) -> list[Pending]:
    # Attention statistics and tokens of each layer with slots, from a text that follows the cache and gets no slots.
    (reading, x), after = begin(decoder.weights, decoder.config, reading), list[LayerCache]()
    for layer, of_layer in zip(decoder.layers, cache.unpacked(), strict=True):
        x, of_layer = block(layer, of_layer.grow().link(after, None), reading, x)
        after.append(of_layer)
    return [of_layer.pending for of_layer in after if of_layer.pending is not None]


def _of_cache(pending: Pending, slots: int) -> Pending:
    # The score's statistics of the slots of the cache, without those of the tokens that are read again.
    def cut(_: Any, stats: Any) -> Any:
        if isinstance(stats, Seen):
            return stats._replace(probs=stats.probs[..., :slots], seen=stats.seen[..., :slots])
        return stats[..., :slots]

    requests = pending.requests["score"]
    return Pending(requests, jax.tree.map(cut, requests, pending.stats["score"], is_leaf=is_request), pending.new)
