"""Reading a prompt into a fixed cache, and writing one token after another from it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Key

from kvjax import cache as caches_
from kvjax import paged
from kvjax.arrange import arrange
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Weights, unembed
from kvjax.plan import Plan
from kvjax.policies.base import Policy
from kvjax.reading import Reading, read_block, read_token
from kvjax.types import LayerCache, setting

if TYPE_CHECKING:
    from kvjax.model import Model


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
    arrays, static = arrange(
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
    arrays, static = arrange(
        model, policy, tokens, budget, lengths, max_new_tokens=max_new_tokens, key=None, plan=plan, chunk=prefill_chunk
    )
    return _prefill.lower(*arrays, **static)


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
    caches, hidden = read_token(state.weights, state.config, state.policy, state.caches, reading)
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
            caches, hidden = read_token(weights, config, policy, caches, reading)
        else:
            caches, hidden = read_block(weights, config, policy, caches, reading, capacities, plan)
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
