"""Tokens through all layers: one per row in a decode step, or a prompt or chunk of it at once."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from kvjax import cache as caches_
from kvjax import paged
from kvjax.attention import (
    alibi_bias,
    attend,
    attend_prompt,
    causal_mask,
    head_slopes,
    join_queries,
    merge,
    near_sums,
    query_block,
    share_of_evicted,
    split_queries,
)
from kvjax.codec import codec_of
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import block, embed
from kvjax.policies.base import Policy
from kvjax.rope import rotate
from kvjax.types import KV, Evicted, LayerCache, NewTokens, Partial
from pallas_kernels.decode_attention import decode_attention


class Reading(struct.PyTreeNode):
    """Which tokens are being read, for all layers alike; the fields are those of `NewTokens`."""

    token: Int[Array, "b t"]
    position: Int[Array, "b t"]
    prompt_length: Int[Array, " b"]
    read: Int[Array, " b"]
    horizon: Int[Array, " b"]
    seed: Array


def read_token(weights, config: ModelConfig, policy: Policy, caches, reading: Reading):
    """One token per row through all layers: the victim is chosen before attention, for everyone."""
    x = embed(weights, config, reading.token, reading.position)
    scratch: Any = paged.scratch(caches, config.groups) if isinstance(caches, paged.Pool) else None
    caches = caches if isinstance(caches, paged.Pool) else list(caches)
    for index, layer in enumerate(weights.layers):

        def attention(q, k, v, index=index):
            nonlocal caches, scratch
            new = new_tokens(config, reading, q, k, v, index)
            if isinstance(caches, paged.Pool):
                caches, out, scratch = paged.read_token(config, policy, caches, index, new, scratch)
                return out
            cache = caches_.fetch(policy, caches[index])
            if policy.shrinks:
                cache = _shrink(config, policy, cache, new)
            cache, _ = exchange(config, policy, cache, new, k)
            cache, out = _attend_slots(config, policy, cache, new, q)
            caches[index] = caches_.stow(policy, cache)
            return out

        x = block(layer, config, config.layer(index), x, attention)
    return caches if isinstance(caches, paged.Pool) else policy.couple(tuple(caches)), x


def exchange(
    config: ModelConfig, policy: Policy, cache: LayerCache, new: NewTokens, raw_k: Float[Array, "b h 1 d"]
) -> tuple[LayerCache, Int[Array, "b h 1"]]:
    """The cache with one new token per row, and the position of the one that left each head, -1 for none."""
    codec = codec_of(policy)
    stored = KV(codec.encode(config, raw_k, new.position), new.v)
    cache, pair, left = caches_.exchange(policy, cache, new, stored)
    evicted = Evicted(codec.restore(config, pair.k, left), pair.v, left >= 0, new.layer)
    cache = codec.settle(config, cache, new, raw_k)
    return cache.replace(state=policy.absorb(cache.state, evicted)), left


def _attend_slots(config: ModelConfig, policy: Policy, cache: LayerCache, new: NewTokens, raw_q):
    """One token per row over its slots, and the cache after the policy has seen what it asks for."""
    codec = codec_of(policy)
    keys, key_position = codec.read(config, cache)
    queries, query_position = codec.query(config, cache, raw_q, new.position)
    if config.position == "alibi" and policy.positions == "cache":  # distances that are not those of the mask
        mask = causal_mask(new.position, cache.position, config.sliding_window)
        partial, probs = attend(queries, keys, cache.kv.v, mask, alibi_bias(config, query_position, key_position))
        seen = policy.observe(cache, probs, new) if policy.needs_probs else cache
        return seen, _answer(policy, cache, partial, probs, new)
    scores = policy.wants(new)
    memory = None if scores == "each" else policy.memory(cache.state, new)  # else `attended` comes before it
    if memory is not None:
        memory = memory._replace(features=memory.features[:, :, :, 0])
    found = decode_attention(
        queries[:, :, :, 0],
        keys,
        cache.kv.v,
        cache.position,
        new.position[:, 0],
        window=config.sliding_window,
        slopes=head_slopes(config),
        low_rank=memory,
        scores=scores,
    )
    partial = Partial(found.out[:, :, :, None], found.lse[..., None])
    if found.scores is None:
        return cache, partial.out
    if scores == "each":
        probs = found.scores[:, :, :, None]
        return policy.observe(cache, probs, new), _answer(policy, cache, partial, probs, new)
    return policy.summed(cache, found.scores[:, :, None], new), partial.out


def read_block(weights, config: ModelConfig, policy: Policy, caches, reading: Reading, capacities, plan):
    """A prompt or a chunk of it through all layers: attend in query blocks, observe each, keep what ranks highest."""
    x = embed(weights, config, reading.token, reading.position)
    caches, selected, news = list(caches), [], []
    for index, layer in enumerate(weights.layers):

        def attention(q, k, v, index=index):
            new = new_tokens(config, reading, q, k, v, index)
            codec = codec_of(policy)
            stored = KV(codec.encode(config, k, new.position), v)
            cache = caches_.fetch(policy, caches[index])
            cache = caches_.append(cache, caches_.entries(policy, new, cache.state, stored))
            cache = codec.settle(config, cache, new, k)
            cache, out = _attend_block(config, policy, cache, new, q)
            cache = policy.commit(cache, new)
            if plan is not None:
                selected.append(paged.select(policy, cache, new, plan))
            elif policy.couples_layers:
                caches[index] = cache
                news.append(new)
            else:
                caches[index] = caches_.stow(policy, _compress(config, policy, cache, new, capacities[index]))
            return out

        x = block(layer, config, config.layer(index), x, attention)
    if policy.couples_layers:
        coupled = policy.couple(tuple(caches))
        caches = [_compress(config, policy, *layer) for layer in zip(coupled, news, capacities, strict=True)]
    return tuple(selected or caches), x


def _attend_block(config: ModelConfig, policy: Policy, cache: LayerCache, new: NewTokens, raw_q):
    codec = codec_of(policy)
    weighing = policy.weighing(cache, new) if policy.needs_probs else None
    ranked = config.position == "alibi" and policy.positions == "cache"  # distances that are not those of the mask
    shown = policy.needs_probs and weighing is None
    last = min(policy.last_queries or new.q.shape[-2], new.q.shape[-2])
    if ranked or (shown and last == new.q.shape[-2]):
        return _attend_and_observe(config, policy, cache, new, raw_q)
    keys, _ = codec.read(config, cache)
    queries, _ = codec.query(config, cache, raw_q, new.position)
    partial, sums = attend_prompt(config, queries, keys, cache.kv.v, new.position, cache.position, weighing)
    out = _answer(policy, cache, partial, None, new)
    if shown:
        return _attend_and_observe(config, policy, cache, *_newest(new, raw_q, last))[0], out
    if sums is None:
        return cache, out
    near = functools.partial(near_sums, config, new.q, new.k, partial.lse, new.position)
    return policy.near(policy.summed(cache, sums, new), near, new), out


def _newest(new: NewTokens, raw_q, count: int):
    """The last tokens of each row, which padding follows, and their unrotated queries."""
    index = new.valid.sum(1, dtype=jnp.int32)[:, None] - count + jnp.arange(count)

    def cut(x, axis=-2):
        shape = [1] * x.ndim
        shape[0], shape[axis] = index.shape
        return jnp.take_along_axis(x, jnp.maximum(index, 0).reshape(shape), axis=axis)

    position = jnp.where(index >= 0, cut(new.position, -1), -1)
    part = new.replace(q=cut(new.q), k=cut(new.k), v=cut(new.v), token=cut(new.token, -1), position=position)
    return part, cut(raw_q)


def _attend_and_observe(config: ModelConfig, policy: Policy, cache: LayerCache, new: NewTokens, raw_q):
    """In blocks of queries whose probabilities the policy is shown."""
    codec = codec_of(policy)
    keys, key_position = codec.read(config, cache)
    size = query_block(raw_q.shape[-2], raw_q.shape[0])

    def read(remembered, queries):
        raw, q, k, v, token, position = queries
        part = new.replace(q=q, k=k, v=v, token=token, position=position)
        seen = cache.replace(stats=remembered[0], state=remembered[1])
        rotated, query_position = codec.query(config, cache, raw, position)
        mask = causal_mask(position, cache.position, config.sliding_window)
        bias = alibi_bias(config, query_position, key_position)
        partial, probs = attend(rotated, keys, cache.kv.v, mask, bias)
        out = _answer(policy, seen, partial, probs, part)
        seen = policy.observe(seen, probs, part)
        return (seen.stats, seen.state), out

    sequences = ((raw_q, -2), (new.q, -2), (new.k, -2), (new.v, -2), (new.token, -1), (new.position, -1))
    blocks = tuple(split_queries(x, axis, size) for x, axis in sequences)
    (stats, state), out = jax.lax.scan(read, (cache.stats, cache.state), blocks)
    return cache.replace(stats=stats, state=state), join_queries(out, -2)


def _compress(config: ModelConfig, policy: Policy, cache: LayerCache, new: NewTokens, capacity: int) -> LayerCache:
    smaller, leaving = caches_.compress(policy, cache, new, capacity)
    keys = codec_of(policy).restore(config, cache.kv.k, cache.position)
    return smaller.replace(state=policy.absorb(cache.state, Evicted(keys, cache.kv.v, leaving, new.layer)))


def _shrink(config: ModelConfig, policy: Policy, cache: LayerCache, new: NewTokens) -> LayerCache:
    """Rows that have just passed the length up to which they may use more slots lose what ranks lowest."""
    fewer = policy.allowed(cache.limit, new.read) < policy.allowed(cache.limit, new.read - 1)
    fewer &= new.valid[:, :1]

    # Only masks leave the branch: a cache that went through it would be copied at every step.
    def losing(cache: LayerCache):
        leaving = caches_.compress(policy, cache, new, cache.capacity)[1] & fewer[..., None]
        keys = codec_of(policy).restore(config, cache.kv.k, cache.position)
        state = policy.absorb(cache.state, Evicted(keys, cache.kv.v, leaving, new.layer))
        less = caches_.drop(cache, leaving)
        return less.position, less.keep, less.order, state

    def same(cache: LayerCache):
        return cache.position, cache.keep, cache.order, cache.state

    position, keep, order, state = jax.lax.cond(fewer.any(), losing, same, cache)
    return cache.replace(position=position, keep=keep, order=order, state=state)


def _answer(policy: Policy, cache: LayerCache, partial: Partial, probs, new: NewTokens):
    if probs is not None:
        partial = policy.attended(cache, partial, probs, new)
    memory = policy.memory(cache.state, new)
    return partial.out if memory is None else merge(partial, share_of_evicted(memory)).out


def new_tokens(config: ModelConfig, reading: Reading, q, k, v, layer: int) -> NewTokens:
    return NewTokens(
        q=rotate(config.rope, q, reading.position[:, None, None]),
        k=rotate(config.rope, k, reading.position[:, None]),
        v=v,
        position=reading.position,
        token=reading.token,
        prompt_length=reading.prompt_length,
        read=reading.read,
        horizon=reading.horizon,
        seed=reading.seed,
        layer=layer,
    )
