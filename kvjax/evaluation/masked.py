"""Masked perplexity: whole texts in one pass, with the tokens that a policy evicts masked out of attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from kvjax.cache.dense import Dense
from kvjax.cache.step import update_score
from kvjax.evaluation.perplexity import begin, judge
from kvjax.inference.state import State, cache_bytes, full_cache_bytes
from kvjax.methods.registry import name_of
from kvjax.model import Model
from kvjax.models.decoder import embed, finish_block, project, sink_logits_of, unembed
from kvjax.policies.allocation import Plan
from kvjax.policies.policy import Policy
from kvjax.training.less.record import Replayed, attend_fully, by_steps, check_mask, join_steps, replay
from kvjax.types import New, View, wide

Look = Callable[[Any, View, New, Policy, Replayed], Any]
"""Function that updates a result from a layer's slots, the token that was read and the replayed step."""


class Masked(NamedTuple):
    """Likelihoods of texts under a policy's masks."""

    nats: Float[np.ndarray, "b m"]
    """Negative log-likelihoods of all tokens but the first."""
    cache_bytes: int
    """Bytes of all rows, as decode steps would allocate them."""
    full_cache_bytes: int
    """Bytes that `full` allocates for them."""


def masked_perplexity(
    model: Model,
    policy: Policy | str,
    tokens: ArrayLike,
    budget: int | float = 1.0,
    *,
    mask: str = "full-softmax",
    plan: Plan | str | None = None,
    seed: int = 0,
) -> Masked:
    """Compute negative log-likelihoods under masked attention, as the harness of LESS does (section 4.1).

    Each layer computes queries, keys and values of the whole text, and the policy is replayed over them. A query
    attends to the keys that are kept at its step, and to what LESS remembers of the others. This saves no memory.

    The other arguments are those of `perplexity`.

    Args:
        mask: `full-softmax` gives the policy the kept keys' probabilities in the softmax over all keys, as the
            published code does. `decode` gives it the probabilities after masking, as in `perplexity(prefix=1)`.
    """
    ids = np.asarray(tokens, np.int32)
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise ValueError(f"texts of shape {ids.shape} have nothing to predict.")
    state = begin(model, policy, ids.shape[0], ids.shape[1], budget, plan=plan, seed=seed)
    check_replay(state.policy)
    check_mask(state.policy, mask)
    return Masked(np.asarray(_nats(state, jnp.asarray(ids), mask=mask)), cache_bytes(state), full_cache_bytes(state))


def check_replay(policy: Policy) -> None:
    """Refuse a policy that cannot be replayed layer by layer, a token at a time."""
    name = name_of(policy)
    if policy.score.requires.shared_slots == "layers":
        raise ValueError(f"policy {name!r} scores all layers together and cannot be replayed layer by layer.")
    if policy.selection is not None or policy.may_shrink or policy.score.requires.host_memory:
        raise ValueError(f"policy {name!r} does more than evicting one token per step; a replay does not.")


@functools.partial(jax.jit, static_argnames="mask")
def _nats(state: State, tokens: Int[Array, "b n"], *, mask: str) -> Float[Array, "b m"]:
    x, _ = replayed(state, tokens, mask, lambda *_: None, lambda _: None)

    def of_row(given: tuple[Float[Array, "m width"], Int[Array, " m"]]) -> Float[Array, " m"]:
        return judge(unembed(state.weights, state.config, given[0]), given[1])[0]

    return jax.lax.map(of_row, (x[:, :-1], tokens[:, 1:]))  # logits of one row at a time: they are large


def replayed(
    state: State, tokens: Int[Array, "b n"], mask: str, look: Look, start: Callable[[View], Any]
) -> tuple[Float[Array, "b n width"], list[Any]]:
    """Run whole texts through all layers, and replay a policy over the queries, keys and values of each.

    Args:
        look: called after every step of a layer, to update its result.
        start: returns the first result, from a layer without tokens.

    Returns:
        Hidden states, and the final result of each layer.
    """
    weights, config, policy, empty = state.weights, state.config, state.policy, state.storage
    assert isinstance(empty, Dense)
    rows, n = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(n), tokens.shape)
    looked: list[Any] = []

    def read_layer(index: int, x: Float[Array, "b n width"]) -> Float[Array, "b n width"]:
        layer, shape, own = weights.layers[index], config.layer_configs[index], policy.layer(index)
        normed, q, k, v = project(layer, config, shape, x, positions)
        sink_logits, lse = sink_logits_of(layer, shape), jnp.zeros(q.shape[:-1], wide(q.dtype))
        if mask == "full-softmax":
            lse = attend_fully(shape, q, k, v, positions).lse

        def one(carry: tuple[Dense, Any], inputs: tuple[Array, ...]) -> tuple[tuple[Dense, Any], Array]:
            storage, sums = carry
            t, token, hidden, q, k, v, lse = inputs
            position = jnp.broadcast_to(t, (rows, 1))
            reading = state.cache.reading(token[:, None], position, position[:, 0] + 1)
            new = reading.of_layer(shape, index, hidden, q, k, v, sink_logits).rotated()
            storage, told, found = replay(own, mask, storage, new, lse)
            storage = update_score(own, storage, index, told.asks, told.answers, new)
            return (storage, look(sums, storage.layers[index], new, own, found)), found.partial.out

        steps = (by_steps(each, axis) for each, axis in ((x, 1), (q, 3), (k, 2), (v, 2), (lse, 3)))
        begun = empty, start(empty.layers[index])
        (_, sums), out = jax.lax.scan(one, begun, (jnp.arange(n), tokens.T, *steps))
        looked.append(sums)
        return finish_block(layer, config, shape, x, normed, join_steps(out, 3))

    x = embed(weights, config, tokens, positions)
    for index in range(config.layers):
        x = read_layer(index, x)
    return x, looked
