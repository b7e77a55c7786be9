"""What kernels learn from: queries, what eviction leaves of their attention, and the pairs that leave."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from kvjax import cache as caches_
from kvjax.attention import alibi_bias, attend, attend_prompt, causal_mask
from kvjax.codec import codec_of
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Weights, block, embed
from kvjax.policies.base import Policy
from kvjax.reading import Reading, exchange, new_tokens
from kvjax.rope import rotate
from kvjax.types import LayerCache, Partial, wide


class Features(struct.PyTreeNode):
    """What one layer's kernels see of whole texts; stacked over layers all arrays have a leading axis L.

    A decode step evicts at most one pair per head, before the step's attention. Pairs stand at the step at which they
    leave, so that the memory is causal linear attention over them, whatever the policy.
    """

    q: Float[Array, "b h g n d"]
    """Queries, rotated by original positions."""
    k: Float[Array, "b h n d"]
    """Keys that leave, rotated by original positions; zeros where none leaves."""
    v: Float[Array, "b h n d"]
    """Values that leave."""
    leaving: Float[Array, "b h n"]
    """1 where a pair leaves, else 0."""
    sparse: Float[Array, "b h g n d"]
    """Attention over what the policy kept."""
    lse: Float[Array, "b h g n"]
    """Its log-sum-exp."""
    full: Float[Array, "b h g n d"]
    """Attention over everything, before the output projection."""


class _Read(struct.PyTreeNode):
    # One layer's attention of the frozen model; queries and keys not rotated yet.
    q: Float[Array, "b h g n d"]
    k: Float[Array, "b h n d"]
    v: Float[Array, "b h n d"]
    full: Partial


_Inputs = tuple[Array, Array, Array, Array]
"""A layer's queries, keys, values and log-sum-exps, of one step or of all steps with time as their first axis."""

_Seen = tuple[Int[Array, "b h"], Partial]
"""The position that left, and attention over what stayed."""


@functools.partial(jax.jit, static_argnames=("config", "capacities", "mask"))
def record(
    weights: Weights,
    policy: Policy,
    tokens: Int[Array, "b n"],
    seed: Array,
    limits: tuple[Int[Array, "b h"], ...],
    *,
    config: ModelConfig,
    capacities: tuple[int, ...],
    mask: str = "decode",
) -> tuple[Features, Int[Array, "L b h n"]]:
    """Run the frozen model over texts, and replay eviction on its queries, keys and values token by token.

    Args:
        weights: of the model.
        policy: the one that evicts, bound to the model.
        tokens: ids [b, n] without padding.
        seed: uint32 [b], the policy's randomness.
        limits: slots that each head may use, for each layer.
        config: the model's shape.
        capacities: slots of each layer's buffers.
        mask: `decode` shows the policy what it would see in decoding; `full-softmax` the same slots' probabilities in
            the full softmax, as in the code published with LESS.

    Returns:
        Features, stacked over layers, and the position that leaves at each step, -1 for none.
    """
    reads = _read_full(weights, config, tokens)
    rows, n = tokens.shape
    dtype = reads[0].k.dtype
    empty = functools.partial(caches_.empty, policy, rows=rows, heads=config.kv_heads, groups=config.groups)
    caches = tuple(
        empty(slots=capacity, width=config.head_width, dtype=dtype, layer=layer).replace(limit=limit)
        for layer, (capacity, limit) in enumerate(zip(capacities, limits, strict=True))
    )
    # As if the first token were the prompt and all others were generated.
    one, horizon = jnp.ones(rows, jnp.int32), jnp.full(rows, n - 1, jnp.int32)

    def step(
        caches: tuple[LayerCache, ...], inputs: tuple[Array, Array, tuple[_Inputs, ...]]
    ) -> tuple[tuple[LayerCache, ...], tuple[_Seen, ...]]:
        t, token, layers = inputs
        position = jnp.broadcast_to(t, (rows, 1))
        reading = Reading(
            token=token[:, None],
            position=position,
            prompt_length=one,
            read=position[:, 0] + 1,
            horizon=horizon,
            seed=seed,
        )
        pairs = list(zip(caches, layers, strict=True))
        moved = [_replay(config, policy, mask, reading, index, *pair) for index, pair in enumerate(pairs)]
        return policy.couple(tuple(cache for cache, _ in moved)), tuple(seen for _, seen in moved)

    inputs = tuple(_time_first(read) for read in reads)
    _, seen = jax.lax.scan(step, caches, (jnp.arange(n), tokens.T, inputs))
    positions = jnp.arange(n)
    made, evicted = [], []
    for read, (left, partial) in zip(reads, seen, strict=True):
        left = jnp.moveaxis(left, 0, -1)
        leaving = left >= 0
        source = jnp.maximum(left, 0)[..., None]
        keys = rotate(config.rope, read.k, positions[None, None])
        features = Features(
            q=rotate(config.rope, read.q, positions[None, None, None]),
            k=jnp.where(leaving[..., None], jnp.take_along_axis(keys, source, axis=2), 0),
            v=jnp.where(leaving[..., None], jnp.take_along_axis(read.v, source, axis=2), 0),
            leaving=leaving.astype(partial.lse.dtype),
            sparse=jnp.moveaxis(partial.out, 0, -2),
            lse=jnp.moveaxis(partial.lse, 0, -1),
            full=read.full.out,
        )
        made.append(features)
        evicted.append(left)
    return jax.tree.map(lambda *layers: jnp.stack(layers).astype(wide(layers[0].dtype)), *made), jnp.stack(evicted)


def _time_first(read: _Read) -> _Inputs:
    q, k, v = (jnp.moveaxis(x, -2, 0) for x in (read.q, read.k, read.v))
    return q, k, v, jnp.moveaxis(read.full.lse, -1, 0)


def _replay(
    config: ModelConfig,
    policy: Policy,
    mask: str,
    reading: Reading,
    index: int,
    cache: LayerCache,
    inputs: _Inputs,
) -> tuple[LayerCache, _Seen]:
    # One layer of `kvjax.reading.read_token`, on given queries, keys and values.
    q, k, v, full_lse = inputs
    q, k, v = q[..., None, :], k[..., None, :], v[..., None, :]
    cache = caches_.fetch(policy, cache)
    codec = codec_of(policy)
    new = new_tokens(config, reading, q, k, v, index)
    cache, position = exchange(config, policy, cache, new, k)
    keys, key_position = codec.read(config, cache)
    queries, query_position = codec.query(config, cache, q, new.position)
    visible = causal_mask(new.position, cache.position, config.sliding_window)
    bias = alibi_bias(config, query_position, key_position)
    partial, probs = attend(queries, keys, cache.kv.v, visible, bias)
    answered = policy.attended(cache, partial, probs, new)
    if mask == "full-softmax":  # the same logits, normalised by the mass of the whole text
        probs = probs * jnp.exp(partial.lse - full_lse[..., None])[..., None]
    cache = caches_.stow(policy, policy.observe(cache, probs, new))
    return cache, (position[..., 0], Partial(answered.out[..., 0, :], answered.lse[..., 0]))


def _read_full(weights: Weights, config: ModelConfig, tokens: Int[Array, "b n"]) -> list[_Read]:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    reads: list[_Read] = []

    def attention(
        q: Float[Array, "b h g n d"], k: Float[Array, "b h n d"], v: Float[Array, "b h n d"]
    ) -> Float[Array, "b h g n d"]:
        rotated = rotate(config.rope, q, positions[:, None, None])
        keys = rotate(config.rope, k, positions[:, None])
        full, _ = attend_prompt(config, rotated, keys, v, positions, positions[:, None], None)
        reads.append(_Read(q, k, v, full))
        return full.out

    x = embed(weights, config, tokens, positions)
    for layer, shape in zip(weights.layers, config.layer_configs, strict=True):
        x = block(layer, config, shape, x, attention)
    return reads
