"""A policy replayed over whole texts: masked perplexity, and the agreement of scores with attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from kvjax.cache.layer import LayerCache, MixerInput
from kvjax.cache.slots import Slots
from kvjax.evaluation.fidelity import by_position
from kvjax.evaluation.perplexity import begin, judge
from kvjax.inference.state import State, cache_bytes, full_cache_bytes
from kvjax.methods.registry import name_of
from kvjax.model import Model
from kvjax.models import decoder as forward
from kvjax.models.decoder import block, unembed
from kvjax.policies.policy import Policy
from kvjax.training.less.record import Replayed, attend_fully, by_steps, check_mask, join_steps, replay
from kvjax.types import LayerTokens, View, setting, wide


class Masked(NamedTuple):
    """Likelihoods of texts under a policy's masks."""

    nats: Float[np.ndarray, "b m"]
    """Negative log-likelihoods of all tokens but the first."""
    cache_bytes: int
    """Bytes of all rows, as decode steps would allocate them."""
    full_cache_bytes: int
    """Bytes that `full` allocates for them."""


def masked_perplexity(
    model: Model, policy: Policy | str, tokens: ArrayLike, budget: int | float = 1.0, *, mask: str = "full-softmax"
) -> Masked:
    """Compute negative log-likelihoods under masked attention, as the harness of LESS does (section 4.1).

    Each layer computes queries, keys and values of the whole text, and the policy is replayed over them. A query
    attends to the keys that are kept at its step, and to what LESS remembers of the others. This saves no memory.

    Args:
        mask: `full-softmax` gives the policy the kept keys' probabilities in the softmax over all keys, as the
            published code does. `decode` gives it the probabilities after masking, as in `perplexity(prefix=1)`.
    """
    ids = np.asarray(tokens, np.int32)
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise ValueError(f"texts of shape {ids.shape} have nothing to predict.")
    state = begin(model, policy, ids.shape[0], ids.shape[1], budget)
    check_replay(state.policy)
    check_mask(state.policy, mask)
    return Masked(np.asarray(_nats(state, jnp.asarray(ids), mask=mask)), cache_bytes(state), full_cache_bytes(state))


@functools.partial(jax.jit, static_argnames="mask")
def _nats(state: State, tokens: Int[Array, "b n"], *, mask: str) -> Float[Array, "b m"]:
    x, _ = replayed(state, tokens, mask)

    def of_row(text: tuple[Float[Array, "m width"], Int[Array, " m"]]) -> Float[Array, " m"]:
        return judge(unembed(state.weights, state.config, text[0]), text[1])[0]

    return jax.lax.map(of_row, (x[:, :-1], tokens[:, 1:]))  # logits of one row at a time: they are large


class Ordering(NamedTuple):
    """Agreement of scores and attention, for each head."""

    loss_ratio: Float[np.ndarray, "b layers h"]
    """Attention lost by dropping tokens by score, minus that by dropping them by attention (equation 7), over n."""
    correlation: Float[np.ndarray, "b layers h"]
    """Pearson correlation of scores and mean attention over positions; NaN if all scores are equal."""


def ordering(model: Model, policy: Policy | str, tokens: ArrayLike) -> Ordering:
    """Read whole texts with every token held, and compare scores with attention (LSH-E, equations 7 to 10, Table 10).

    If scores change with every query, a token's score is the mean over all queries from its own on. Its attention is
    the sum over queries and the mean over the query heads of a KV head, divided by n (equation 8).
    """
    ids = np.asarray(tokens, np.int32)
    state = begin(model, policy, ids.shape[0], ids.shape[1], 1.0)
    check_replay(state.policy)
    scores, attention = map(np.asarray, _sums(state, jnp.asarray(ids)))
    queries = ids.shape[1] - np.arange(ids.shape[1])
    return compare(scores / queries, attention / ids.shape[1])


def compare(scores: Float[np.ndarray, "*b n"], attention: Float[np.ndarray, "*b n"]) -> Ordering:
    """Return the attention loss ratio over n, and Pearson's correlation, of scores and attention of the same tokens."""
    order = np.argsort(scores, axis=-1, kind="stable")
    lost = np.cumsum(np.take_along_axis(attention, order, axis=-1), axis=-1)
    lowest = np.cumsum(np.sort(attention, axis=-1), axis=-1)
    s, a = (x - x.mean(-1, keepdims=True) for x in (scores, attention))
    spread = np.sqrt((s**2).sum(-1) * (a**2).sum(-1))
    correlation = np.divide((s * a).sum(-1), spread, out=np.full(spread.shape, np.nan), where=spread > 0)
    return Ordering((lost - lowest).mean(-1), correlation)


@jax.jit
def _sums(state: State, tokens: Int[Array, "b n"]) -> tuple[Float[Array, "b layers h n"], Float[Array, "b layers h n"]]:
    def start(view: View) -> tuple[Array, Array]:
        return jnp.zeros(view.position.shape), jnp.zeros(view.position.shape)

    def update(
        sums: tuple[Array, Array], view: View, new: LayerTokens, policy: Policy, step: Replayed
    ) -> tuple[Array, Array]:
        score = jnp.where(view.live, policy.scores_and_protection(view, new)[0], 0.0)
        assert step.probs is not None
        return sums[0] + score, sums[1] + step.probs.mean((2, 3))

    _, results = replayed(state, tokens, "decode", start, update)
    by_token = [[by_position(total, view.position, tokens.shape[1]) for total in sums] for view, sums in results]
    scores, attention = (jnp.stack(layers, axis=1) for layers in zip(*by_token, strict=True))
    return scores, attention


def check_replay(policy: Policy) -> None:
    """Refuse a policy that cannot be replayed layer by layer, a token at a time."""
    name = name_of(policy)
    if policy.score.requires.shared_slots == "layers":
        raise ValueError(f"policy {name!r} scores all layers together and cannot be replayed layer by layer.")
    if policy.selection is not None or policy.may_shrink or policy.score.requires.host_memory:
        raise ValueError(f"policy {name!r} does more than evicting one token per step; a replay does not.")


def replayed(
    state: State,
    tokens: Int[Array, "b n"],
    mask: str,
    start: Callable[[View], Any] = lambda view: None,
    update: Callable[[Any, View, LayerTokens, Policy, Replayed], Any] = lambda result, *_: result,
) -> tuple[Float[Array, "b n width"], list[tuple[View, Any]]]:
    """Run whole texts through all layers, and replay a policy over the queries, keys and values of each.

    Args:
        start: returns the first result of a layer, from its empty slots.
        update: returns the next result, from the last one, the layer's slots, the token that was read, the layer's
            policy and the replayed step.

    Returns:
        Hidden states, and the last slots and result of each layer.
    """
    state.config.check_all_store("a replay of a policy layer by layer")
    rows, n = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(n), tokens.shape)
    reading = state.cache.reading(tokens, positions, jnp.full(rows, n))
    (reading, x), results = forward.begin(state.weights, state.config, reading), list[tuple[View, Any]]()
    for layer, slots in zip(state.decoder.layers, state.cache.slots, strict=True):
        x, text = block(layer, _Text(slots=slots, result=start(slots), mask=mask, update=update), reading, x)
        results.append((text.slots, text.result))
    return x, results


class _Text(LayerCache):
    """Whole texts in one layer, over whose queries, keys and values a policy is replayed token by token."""

    slots: Slots
    result: Any
    mask: str = setting("decode")
    update: Callable[[Any, View, LayerTokens, Policy, Replayed], Any] = setting(None)

    def attend(
        self,
        tokens: MixerInput,
        q: Float[Array, "b h g n d"],
        k: Float[Array, "b h n d"],
        v: Float[Array, "b h n e"],
        sink_logits: Float[Array, "h g"] | None,
    ) -> tuple[Float[Array, "b h g n e"], _Text]:
        policy, text = tokens.policy, tokens.reading
        lse = jnp.zeros(q.shape[:-1], wide(q.dtype))
        if self.mask == "full-softmax":
            lse = attend_fully(tokens.shape, q, k, v, text.position).lse

        def one(carry: tuple[Slots, Any], inputs: tuple[Array, ...]) -> tuple[tuple[Slots, Any], Array]:
            slots, result = carry
            t, token, hidden, q, k, v, lse = inputs
            position = jnp.broadcast_to(t, token.shape)[:, None]
            reading = text.replace(token=token[:, None], position=position, read=position[:, 0] + 1)
            of_token = tokens._replace(reading=reading, hidden=hidden).attending(q, k, v, sink_logits).rotated()
            slots, pending, replayed = replay(policy, self.mask, slots, of_token, lse)
            slots = slots.updated(policy, pending)
            return (slots, self.update(result, slots, of_token, policy, replayed)), replayed.partial.out

        arrays = ((tokens.hidden, 1), (q, 3), (k, 2), (v, 2), (lse, 3))
        steps = (by_steps(array, axis) for array, axis in arrays)
        inputs = jnp.arange(q.shape[3]), text.token.T, *steps
        (slots, result), out = jax.lax.scan(one, (self.slots, self.result), inputs)
        return join_steps(out, 3), self.replace(slots=slots, result=result)
