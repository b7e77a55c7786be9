"""Reading a prompt into a fixed cache, and writing one token after another from it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Key

from kvjax import cache as caches_
from kvjax import paged
from kvjax.attention import (
    SLOT_BLOCK,
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
from kvjax.models.decoder import Weights, block, embed, rotate, unembed
from kvjax.plan import PLANS, Plan, Uniform
from kvjax.policies import policy as policy_by_name
from kvjax.policies.base import Policy
from kvjax.types import KV, Evicted, LayerCache, NewTokens, Partial, setting
from pallas_kernels.decode_attention import decode_attention

if TYPE_CHECKING:
    from kvjax.models.model import Model


class Reading(struct.PyTreeNode):
    """Which tokens are being read, for all layers alike; the fields are those of `NewTokens`."""

    token: Int[Array, "b t"]
    position: Int[Array, "b t"]
    prompt_length: Int[Array, " b"]
    read: Int[Array, " b"]
    horizon: Int[Array, " b"]
    seed: Array


class State(struct.PyTreeNode):
    """Everything that decoding needs and changes: an immutable pytree, so branching from one is free.

    Rows are independent: whatever happens to one depends on nothing but that row.
    """

    weights: Weights
    policy: Policy
    caches: tuple[LayerCache, ...] | paged.Pool
    position: Int[Array, " b"]
    """Position of the next token."""
    prompt_length: Int[Array, " b"]
    horizon: Int[Array, " b"]
    """Tokens that the cache was planned to generate."""
    key: Key[Array, " b"]
    seed: Array
    """uint32 [b], the policy's randomness."""
    config: ModelConfig = setting(None)


def prefill(
    model: Model,
    policy: Policy | str,
    tokens: ArrayLike | Sequence[Sequence[int]],
    budget: int | float | Sequence[int] = 1.0,
    *,
    lengths: ArrayLike | Sequence[int] | None = None,
    max_new_tokens: int = 256,
    key: Key[Array, ""] | Key[Array, " b"] | None = None,
    plan: Plan | str | None = None,
    prefill_chunk: int | None = None,
) -> tuple[State, Float[Array, "b vocab"]]:
    """Read prompts into a cache that holds no more than its budget.

    Args:
        model: from `kvjax.load`.
        policy: which tokens stay; a name or a `Policy`.
        tokens: prompts [b, n], padded on the right; or a list of lists of unequal lengths.
        budget: slots per KV head; or a fraction of prompt + `max_new_tokens`, per row; or slots for each layer. Left
            out for policies that find out themselves what each head needs.
        lengths: tokens of each prompt [b], 1 to n; None if none is padded.
        max_new_tokens: how many tokens are going to be generated, for fractions, schedules and the full cache.
        key: randomness of sampling and of random policies, one for all rows or one each; None is `jax.random.key(0)`.
        plan: how the budget is spread over layers, or its heads; a name, a `Plan`, or None for the policy's own.
        prefill_chunk: compress after every so many prompt tokens, so that memory never exceeds budget + chunk;
            None is the policy's own way, mostly the whole prompt; 1 reads it by decode steps.

    Returns:
        The state to decode from, and the logits for the first new token [b, vocab].

    Raises:
        ValueError: a prompt is empty or does not fit the model, or the budget does not fit the policy.
    """
    arrays, static = _arrange(
        model, policy, tokens, budget, lengths, max_new_tokens=max_new_tokens, key=key, plan=plan, chunk=prefill_chunk
    )
    caches, seed, logits = _prefill(*arrays, **static)
    if static["plan"] is not None:
        page = paged.page_slots(arrays[2].shape[1] + max_new_tokens)
        caches = paged.build(caches, page)
    weights, bound, _, start, horizon, keys, _ = arrays
    state = State(
        weights=weights,
        policy=bound,
        caches=caches,
        position=jnp.copy(start),  # a step may reuse its memory, prompt_length must live on
        prompt_length=start,
        horizon=horizon,
        key=keys,
        seed=seed,
        config=model.config,
    )
    return state, logits


def lower_prefill(
    model: Model,
    policy: Policy | str,
    tokens: ArrayLike | Sequence[Sequence[int]],
    budget: int | float | Sequence[int] = 1.0,
    *,
    lengths: ArrayLike | Sequence[int] | None = None,
    max_new_tokens: int = 256,
    plan: Plan | str | None = None,
    prefill_chunk: int | None = None,
) -> jax.stages.Lowered:
    """The program of `prefill` for these arguments, to compile and ask for its `memory_analysis()`."""
    arrays, static = _arrange(
        model, policy, tokens, budget, lengths, max_new_tokens=max_new_tokens, key=None, plan=plan, chunk=prefill_chunk
    )
    return _prefill.lower(*arrays, **static)


def _arrange(model, policy, tokens, budget, lengths, *, max_new_tokens, key, plan, chunk):
    # Everything that is decided on the host: checks, slots per layer, padding to a bucket.
    policy = (policy_by_name(policy) if isinstance(policy, str) else policy).bind(model)
    policy = policy.budgeted(budget)
    plan = _plan_by_name(plan)
    config = model.config
    own = _check_pages(policy, plan, budget, chunk)
    padded, real = _pad_rows(tokens, lengths)
    rows, width = padded.shape
    _check_prompts(padded, real, max_new_tokens, policy, config)
    policy.check_prompt(int(real.min()))
    limits, capacities = plan_slots(policy, plan, budget, real, max_new_tokens, config, width)
    chunk = policy.prefill_chunk if chunk is None else chunk
    if chunk is not None and chunk < 1:
        raise ValueError(f"prefill_chunk={chunk} is not a number of tokens from 1.")
    if chunk is not None and chunk < width and policy.couples_layers and chunk > 1:
        raise ValueError(f"{type(policy).__name__} shares scores between layers and reads a prompt whole or by 1.")
    size = bucket(width) if chunk is None or chunk >= width else -(-bucket(width) // chunk) * chunk
    chunk = None if chunk is None or (chunk >= width and chunk > 1) else chunk
    keys = jax.random.key(0) if key is None else key
    if keys.ndim == 0:
        keys = jnp.broadcast_to(keys, (rows,))
    start, horizon = jnp.asarray(real, jnp.int32), jnp.full(rows, max_new_tokens, jnp.int32)
    arrays = (
        model.weights,
        policy,
        jnp.asarray(np.pad(padded, ((0, 0), (0, size - width))), jnp.int32),
        start,
        horizon,
        keys,
        tuple(jnp.asarray(limit, jnp.int32) for limit in limits),
    )
    if own is not None:
        capacities = (None,) * config.layers
    return arrays, dict(config=config, capacities=capacities, chunk=chunk, plan=own)


def _check_pages(policy: Policy, plan: Plan | None, budget, chunk: int | None) -> Plan | None:
    # The plan by which heads get slots of their own, or None where all heads of a layer have the same.
    if policy.decides_slots:
        if plan is not None or not (isinstance(budget, float) and budget == 1.0):
            raise ValueError(
                f"{type(policy).__name__} decides itself how many slots each head gets, so budget={budget!r} and "
                f"plan={plan!r} mean nothing to it; leave both out and change its settings."
            )
        plan = Uniform()
    elif plan is None or not plan.per_head:
        return None
    if not policy.pages or not policy.evicts or policy.positions != "original":
        raise ValueError(
            f"{type(policy).__name__} with positions={policy.positions!r} needs the same slots in every head of a "
            "layer; choose another plan, or another policy such as h2o, snapkv or keyformer."
        )
    if chunk is not None or policy.prefill_chunk is not None:
        raise ValueError(
            f"prefill_chunk={chunk} does not go with a budget for each head, which only the whole prompt can tell; "
            "leave it out."
        )
    return plan


def _plan_by_name(plan: Plan | str | None) -> Plan | None:
    if not isinstance(plan, str):
        return plan
    if plan not in PLANS:
        raise ValueError(f"there is no plan {plan!r}; choose one of {', '.join(PLANS)}.")
    return PLANS[plan]()


def decode_step(state: State, token: Int[Array, " b"]) -> tuple[State, Float[Array, "b vocab"]]:
    """Write one token per row into the cache and return the logits for the next.

    Pure, compiled, and fit for `jit`, `scan` and `vmap`. A function of your own that is jitted and returns a state
    also returns (copies) its weights; return what changed, or donate, where that matters.

    Args:
        state: from `prefill` or an earlier step; it stays valid, so a prompt can be continued many times.
        token: [b].

    Returns:
        The next state, and logits [b, vocab]. With the full cache, logits beyond the planned length are NaN:
        there is no slot left and nothing may leave; so it is for policies that set slots aside for that length.
    """
    moving, logits = _step(*split_state(state), token)
    return join_state(state, moving), logits


def decode_step_in_place(state: State, token: Int[Array, " b"]) -> tuple[State, Float[Array, "b vocab"]]:
    """`decode_step` that reuses the memory of the given state's caches, which are gone afterwards; weights stay."""
    moving, logits = _step_in_place(*split_state(state), token)
    return join_state(state, moving), logits


Moving = tuple[tuple[LayerCache, ...] | paged.Pool, Int[Array, " b"]]


def split_state(state: State) -> tuple[State, Moving]:
    # What a step changes apart from what it only reads: a jitted function copies whatever it returns unchanged.
    return state.replace(caches=(), position=None), (state.caches, state.position)


def join_state(fixed: State, moving: Moving) -> State:
    return fixed.replace(caches=moving[0], position=moving[1])


def _step_parts(fixed: State, moving: Moving, token: Int[Array, " b"]) -> tuple[Moving, Float[Array, "b vocab"]]:
    after, logits = step(join_state(fixed, moving), token)
    return split_state(after)[1], logits


_step = jax.jit(_step_parts)
_step_in_place = jax.jit(_step_parts, donate_argnums=1)


def step(state: State, token: Int[Array, " b"]) -> tuple[State, Float[Array, "b vocab"]]:
    """`decode_step` before compilation, for loops that are compiled as a whole."""
    reading = Reading(
        token=token[:, None],
        position=state.position[:, None],
        prompt_length=state.prompt_length,
        read=state.position + 1,
        horizon=state.horizon,
        seed=state.seed,
    )
    caches, hidden = _read_token(state.weights, state.config, state.policy, state.caches, reading)
    logits = unembed(state.weights, state.config, hidden[:, 0])
    if not state.policy.evicts or state.policy.ends:
        planned = state.prompt_length + state.horizon
        logits = jnp.where((state.position < planned)[:, None], logits, jnp.nan)
    return state.replace(caches=caches, position=state.position + 1), logits


def cache_bytes(state: State) -> int:
    """Bytes that the caches occupy: keys, values, positions, scores, codes and states, empty slots included."""
    return caches_.allocated_bytes(state.caches)


def full_cache_bytes(state: State) -> int:
    """Bytes of keys and values that a full cache would hold at the end, prompt and planned tokens, padding excluded."""
    config, dtype = state.config, state.weights.layers[0].key.weight.dtype
    tokens = int(np.sum(np.asarray(state.prompt_length) + np.asarray(state.horizon)))
    return 2 * tokens * config.layers * config.kv_heads * config.head_width * dtype.itemsize


def held_positions(state: State) -> list[np.ndarray]:
    """For each layer the position of the token in each slot, int [b, h, c] on the host, -1 where there is none."""
    if isinstance(state.caches, paged.Pool):
        return paged.positions(state.caches)
    return [np.asarray(cache.position) for cache in state.caches]


def slot_limits(state: State) -> list[np.ndarray]:
    """For each layer the slots that each row and head may use, int [b, h] on the host."""
    if isinstance(state.caches, paged.Pool):
        return [np.asarray(limit) for limit in state.caches.limit]
    return [np.asarray(cache.limit) for cache in state.caches]


def bucket(tokens: int) -> int:
    """The padded length that prompts share a program at: the next power of two or halfway point, at least 16."""
    power = 16
    while power < tokens:
        power *= 2
    return power * 3 // 4 if power > 16 and power * 3 // 4 >= tokens else power


def round_slots(slots: int) -> int:
    """Slots in the buffers: the next multiple of 16, of the attention block beyond one block."""
    unit = 16 if slots <= SLOT_BLOCK else SLOT_BLOCK
    return -(-slots // unit) * unit


def plan_slots(
    policy: Policy,
    plan: Plan | None,
    budget: int | float | Sequence[int],
    lengths: np.ndarray,
    max_new_tokens: int,
    config: ModelConfig,
    width: int,
) -> tuple[list[np.ndarray], tuple[int, ...]]:
    """Slots that each row and head may use, int [b, h] per layer, and those of each layer's buffers.

    Raises:
        ValueError: the budget is not positive, does not match the layers or does not fit the policy's protections.
    """
    rows, total = len(lengths), lengths + max_new_tokens
    one = isinstance(budget, (int, float, np.integer, np.floating))
    per_row = _slots_per_row(budget, total) if one else total
    if not policy.evicts:
        limits = np.broadcast_to(total, (config.layers, rows))
        capacity = round_slots(bucket(width) + max_new_tokens)
        return [np.repeat(limit[:, None], config.kv_heads, 1) for limit in limits], (capacity,) * config.layers
    if one:
        plan = policy.default_plan() if plan is None else plan
        limits = np.stack([plan.budgets(int(slots), config.layers) for slots in per_row], axis=1)
    else:
        if plan is not None:
            raise ValueError("a budget for each layer leaves nothing to plan; give one number, or no plan.")
        if len(budget) != config.layers or min(budget) < 1:
            raise ValueError(
                f"budget={list(budget)} is not a number of slots from 1 for each of {config.layers} layers."
            )
        limits = np.repeat(np.asarray(budget, np.int64)[:, None], rows, axis=1)
    limits = limits + policy.extra_slots
    policy.check_budget(int(limits.min()))
    capacities = tuple(round_slots(policy.buffer_slots(int(limit.max()))) for limit in limits)
    if policy.couples_layers and (limits != limits[0]).any():
        raise ValueError(
            f"{type(policy).__name__} with one score for all layers needs equal budgets; use plan='uniform'."
        )
    return [np.repeat(limit[:, None], config.kv_heads, 1) for limit in limits], capacities


def _slots_per_row(budget: int | float, total: np.ndarray) -> np.ndarray:
    if isinstance(budget, (int, np.integer)):
        if budget < 1:
            raise ValueError(f"budget={budget} is not a number of slots from 1, nor a fraction between 0.0 and 1.0.")
        return np.full(len(total), budget)
    if not 0 < budget <= 1:
        raise ValueError(f"budget={budget} is not a fraction in (0.0, 1.0], nor a whole number of slots.")
    return np.maximum(1, np.floor(budget * total + 1e-6).astype(np.int64))


def _pad_rows(tokens, lengths) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(tokens, (list, tuple)):
        if lengths is None:
            lengths = [len(row) for row in tokens]
        width = max((len(row) for row in tokens), default=0)
        if width == 0:
            raise ValueError("a prompt is empty; give at least one token.")
        tokens = np.array([list(row) + [0] * (width - len(row)) for row in tokens], np.int32).reshape(-1, width)
    tokens = np.asarray(tokens)
    if tokens.ndim != 2:
        raise ValueError(f"tokens of shape {tokens.shape} are not rows of prompts [b, n].")
    lengths = np.full(len(tokens), tokens.shape[1]) if lengths is None else np.asarray(lengths)
    return tokens, lengths.astype(np.int64)


def _check_prompts(
    tokens: np.ndarray, lengths: np.ndarray, max_new_tokens: int, policy: Policy, config: ModelConfig
) -> None:
    if len(tokens) == 0 or lengths.min() < 1:
        raise ValueError("a prompt is empty; give at least one token.")
    if lengths.shape != (len(tokens),) or lengths.max() > tokens.shape[1]:
        raise ValueError(f"lengths={lengths.tolist()} do not fit tokens of shape {tokens.shape}.")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} is not a number of tokens from 1.")
    outside = tokens[np.arange(tokens.shape[1]) < lengths[:, None]]
    if outside.min() < 0 or outside.max() >= config.vocab_size:
        bad = outside[(outside < 0) | (outside >= config.vocab_size)][0]
        raise ValueError(f"token {bad} is not in the vocabulary of {config.vocab_size}.")
    if lengths.max() > config.max_positions and policy.positions == "original":
        raise ValueError(
            f"a prompt of {lengths.max()} tokens is longer than the model's {config.max_positions} positions; "
            "shorten it or use a policy with positions='cache'."
        )


@functools.partial(jax.jit, static_argnames=("config", "capacities", "chunk", "plan"))
def _prefill(weights, policy, tokens, lengths, horizon, keys, limits, *, config, capacities, chunk, plan=None):
    rows, padded = tokens.shape
    seed = jax.vmap(lambda key: jax.random.bits(jax.random.fold_in(key, 1), dtype=jnp.uint32))(keys)
    dtype = weights.layers[0].key.weight.dtype
    # A prompt read whole starts from no slots at all; one read in chunks from a cache of its final size.
    caches = tuple(
        caches_.empty(
            policy,
            rows=rows,
            heads=config.kv_heads,
            groups=config.groups,
            slots=0 if chunk is None else capacity,
            width=config.head_width,
            dtype=dtype,
            layer=layer,
        ).replace(limit=limit)
        for layer, (capacity, limit) in enumerate(zip(capacities, limits, strict=True))
    )
    size = padded if chunk is None else chunk

    def read_chunk(start, carry):
        caches, last = carry
        position = start + jnp.arange(size)
        reading = Reading(
            token=jax.lax.dynamic_slice_in_dim(tokens, start, size, axis=1),
            position=jnp.where(position < lengths[:, None], position, -1),
            prompt_length=lengths,
            read=jnp.minimum(lengths, start + size),
            horizon=horizon,
            seed=seed,
        )
        if size == 1:
            caches, hidden = _read_token(weights, config, policy, caches, reading)
        else:
            caches, hidden = _read_block(weights, config, policy, caches, reading, capacities, plan)
        is_last = position == (lengths - 1)[:, None]
        newest = jnp.einsum("btw,bt->bw", hidden, is_last.astype(hidden.dtype))
        return caches, jnp.where(is_last.any(1)[:, None], newest, last)

    last = jnp.zeros((rows, config.width), dtype)
    if chunk is None:
        caches, last = read_chunk(0, (caches, last))
    else:
        caches = tuple(caches_.stow(policy, cache) for cache in caches)
        caches, last = jax.lax.fori_loop(
            0, -(-lengths.max() // size), lambda i, carry: read_chunk(i * size, carry), (caches, last)
        )
    return caches, seed, unembed(weights, config, last)


def _read_token(weights, config: ModelConfig, policy: Policy, caches, reading: Reading):
    """One token per row through all layers: the victim is chosen before attention, for everyone."""
    x = embed(weights, config, reading.token, reading.position)
    scratch: Any = paged.scratch(caches, config.groups) if isinstance(caches, paged.Pool) else None
    caches = caches if isinstance(caches, paged.Pool) else list(caches)
    for index, layer in enumerate(weights.layers):

        def attention(q, k, v, index=index):
            nonlocal caches, scratch
            new = _new_tokens(config, reading, q, k, v, index)
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

        x = block(layer, config, x, attention)
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


def _read_block(weights, config: ModelConfig, policy: Policy, caches, reading: Reading, capacities, plan):
    """A prompt or a chunk of it through all layers: attend in query blocks, observe each, keep what ranks highest."""
    x = embed(weights, config, reading.token, reading.position)
    caches, selected, news = list(caches), [], []
    for index, layer in enumerate(weights.layers):

        def attention(q, k, v, index=index):
            new = _new_tokens(config, reading, q, k, v, index)
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

        x = block(layer, config, x, attention)
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


def _new_tokens(config: ModelConfig, reading: Reading, q, k, v, layer: int) -> NewTokens:
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
