"""Texts that are read again over a cache: their tokens attend and get no slots. Scores or queries are kept of them."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kvjax.cache.dense import Dense
from kvjax.cache.step import Pending, sum_over_layers, update_score
from kvjax.inference.cache import Cache, cache_specs
from kvjax.inference.layers import Reading, append_and_attend
from kvjax.inference.padding import bucket
from kvjax.inference.prepare import longest_text
from kvjax.inference.sharding import OF_HEADS, OF_ROWS, joined, on_mesh, policy_specs, shared, storage_specs
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Weights, embed
from kvjax.models.sharding import on_device, weight_specs
from kvjax.policies.policy import Policy
from kvjax.policies.score import Replay
from kvjax.policies.stats import Seen, is_ask
from kvjax.types import Kernels
from kvjax.utils.processes import on_host

LEAST = 32
"""Fewest positions that must be left to read a chunk of a longer text."""


def read_again(
    weights: Weights,
    policy: Policy,
    cache: Cache,
    tokens: Int[np.ndarray, "b n"],
    lengths: Int[np.ndarray, " b"],
    *,
    config: ModelConfig,
    kernels: Kernels,
    mesh: Mesh | None,
) -> Cache:
    """Read texts again over a dense cache, with the settings in the score's `Requirements.replay`.

    Each chunk of a text comes after the replay's request, at the positions that follow the cache's own text. Neither is
    kept for the next chunk.

    Args:
        weights: weights of the model.
        policy: policy, bound to the model.
        cache: cache without a random key, see `Cache.key`.
        tokens: the texts, padded on the right.
        lengths: tokens of each text.
        config: configuration of the model.
        kernels: implementation of every operation.
        mesh: devices that shard the cache; None for one device.

    Raises:
        ValueError: the model has too few positions after a text.
    """
    replay = policy.score.requires.replay
    assert replay is not None
    sizes = _chunks(replay, policy, on_host(cache.position), lengths, config)
    width = bucket(replay.most_before + int(sizes.max()))
    for number in range(int(np.max(-(-lengths // sizes)))):
        ids, counts = np.zeros((len(tokens), width), np.int32), np.zeros(len(tokens), np.int32)
        for row, size in enumerate(sizes.tolist()):
            start, end = number * size, min((number + 1) * size, int(lengths[row]))
            if start < end:
                text = replay.before(tokens[row, :start].tolist()) + tokens[row, start:end].tolist()
                ids[row, : len(text)], counts[row] = text, len(text)
        texts = jnp.asarray(ids), jnp.asarray(counts)
        storage = _read(weights, policy, cache, *texts, config=config, kernels=kernels, mesh=mesh)
        cache = cache.replace(storage=storage)
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


@functools.partial(jax.jit, static_argnames=("config", "kernels", "mesh"))
def _read(
    weights: Weights,
    policy: Policy,
    cache: Cache,
    tokens: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    *,
    config: ModelConfig,
    kernels: Kernels,
    mesh: Mesh | None,
) -> Dense:
    def here(weights: Weights, policy: Policy, cache: Cache, tokens: Array, lengths: Array) -> Dense:
        reading = cache.following(tokens, lengths).replace(replayed=True, kernels=kernels)
        storage: Dense = joined(cache.storage, mesh)
        found = _told(weights, on_device(config, mesh), policy, storage, reading)
        of_cache = [_of_cache(told, view.capacity) for told, view in zip(found, storage.layers, strict=True)]
        for index, told in enumerate(sum_over_layers(of_cache)):
            storage = update_score(policy.layer(index), storage, index, *told)
        return shared(storage, mesh)

    given = weight_specs(weights, config, mesh), policy_specs(policy), cache_specs(cache), OF_ROWS, OF_ROWS
    return on_mesh(here, mesh, given, storage_specs(cache.storage))(weights, policy, cache, tokens, lengths)


@functools.partial(jax.jit, static_argnames=("config", "kernels", "mesh"))
def replayed_queries(
    weights: Weights,
    policy: Policy,
    cache: Cache,
    tokens: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    *,
    config: ModelConfig,
    kernels: Kernels,
    mesh: Mesh | None,
) -> tuple[Float[Array, "b h g n d"], ...]:
    """Return each layer's queries of a text that is read on top of a cache, with the arguments of `read_again`."""

    def here(weights: Weights, policy: Policy, cache: Cache, tokens: Array, lengths: Array) -> tuple[Array, ...]:
        reading = cache.following(tokens, lengths)
        reading = reading.replace(prompt_length=reading.read, kernels=kernels)
        storage: Dense = joined(cache.storage, mesh).unpack()
        return tuple(told.new.q for told in _told(weights, on_device(config, mesh), policy, storage, reading))

    given = weight_specs(weights, config, mesh), policy_specs(policy), cache_specs(cache), OF_ROWS, OF_ROWS
    return on_mesh(here, mesh, given, (OF_HEADS,) * config.layers)(weights, policy, cache, tokens, lengths)


def _told(weights: Weights, config: ModelConfig, policy: Policy, storage: Dense, reading: Reading) -> list[Pending]:
    # Each layer's attention statistics and tokens, from a text that follows the cache and gets no slots in it.
    x, found = embed(weights, config, reading.token, reading.position), list[Pending]()
    for index, (layer, shape) in enumerate(zip(weights.layers, config.layer_configs, strict=True)):
        place = storage.alone(index), (0, index)
        _, told, x = append_and_attend(layer, config, shape, policy.layer(index), *place, reading, x)
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
