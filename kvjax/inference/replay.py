"""Second reading of a text over a cache: its tokens attend and update scores, and get no slots."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from kvjax.cache.dense import Dense
from kvjax.cache.step import Pending, share_of_residual, sum_over_layers, update_score
from kvjax.inference.cache import Cache, cache_specs
from kvjax.inference.layers import layer_numbered
from kvjax.inference.prepare import bucket
from kvjax.inference.sharding import OF_ROWS, joined, on_mesh, policy_specs, shared, storage_specs
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Weights, embed, finish_block, project, sink_logits_of
from kvjax.models.sharding import on_device, weight_specs
from kvjax.policies.policy import Policy
from kvjax.policies.score import Replay
from kvjax.policies.stats import Seen, is_ask, of_all_layers
from kvjax.types import Kernels, PyTree
from kvjax.utils.processes import on_host
from pallas_kernels.attention import with_sink

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

    Each chunk of a text comes after the replay's prompt, at the positions that follow the cache's own text. Neither is
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
    width = bucket(len(replay.prompt) + int(sizes.max()))
    for number in range(int(np.max(-(-lengths // sizes)))):
        ids, counts = np.zeros((len(tokens), width), np.int32), np.zeros(len(tokens), np.int32)
        for row, size in enumerate(sizes.tolist()):
            chunk = tokens[row, number * size : min((number + 1) * size, int(lengths[row]))]
            if chunk.size:
                text = [*replay.prompt, *chunk.tolist()]
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
    if policy.codec.positions == "cache":
        return wanted
    room = config.max_positions - read - len(replay.prompt)
    if (room < np.minimum(wanted, LEAST)).any():
        raise ValueError(
            f"policy {policy.name} reads a text of {int(read.max())} tokens again at the positions after it, and the "
            f"model has {config.max_positions}; use a text of at most "
            f"{max(config.max_positions - len(replay.prompt) - LEAST, 0)} tokens."
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
    run = functools.partial(_read_on_device, config=config, kernels=kernels, mesh=mesh)
    specs = cache_specs(cache)
    given = weight_specs(weights, config, mesh), policy_specs(policy), specs, OF_ROWS, OF_ROWS
    return on_mesh(run, mesh, given, storage_specs(cache.storage))(weights, policy, cache, tokens, lengths)


def _read_on_device(
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
    config = on_device(config, mesh)
    place = jnp.arange(tokens.shape[1])
    position = jnp.where(place < lengths[:, None], cache.position[:, None] + place, -1)
    reading = cache.reading(tokens, position, cache.position + lengths)
    reading = reading.replace(given=True, replayed=True, kernels=kernels)
    storage: Dense = joined(cache.storage, mesh)
    x = embed(weights, config, reading.token, reading.position)
    pending: list[Pending] = []
    policies = [policy.layer(index) for index in range(config.layers)]
    for index, (layer, shape) in enumerate(zip(weights.layers, config.layer_configs, strict=True)):
        part = policies[index]
        with layer_numbered(part, index):
            normed, q, k, v = project(layer, config, shape, x, reading.position)
            new = reading.new(shape, index, x, q, k, v, sink_logits=sink_logits_of(layer, shape))
            both = storage.alone(index).append(part, shape, 0, new)
            asks = part.score.asks(storage.heads(index), new)
            remembered = share_of_residual(part, both, 0, new)
            _, found = both.attend(part, shape, 0, new, asks, remembered, part.selection, block=True)
            answers = _of_cache(asks, found.answers, storage.layers[index].capacity)
            if of_all_layers(asks):
                pending.append(Pending(asks, answers, new))
            else:
                storage = update_score(part, storage, index, asks, answers, new)
            x = finish_block(layer, config, shape, x, normed, with_sink(found.partial, new.sink_logits).out)
    for index, each in enumerate(sum_over_layers(pending)):
        storage = update_score(policies[index], storage, index, each.asks, each.answers, each.new)
    return shared(storage, mesh)


def _of_cache(asks: PyTree, answers: PyTree, slots: int) -> PyTree:
    # Statistics of the slots of the cache, without those of the tokens that are read again.
    def cut(_: Any, found: Any) -> Any:
        return found._replace(probs=found.probs[..., :slots]) if isinstance(found, Seen) else found[..., :slots]

    return jax.tree.map(cut, asks, answers, is_leaf=is_ask)
