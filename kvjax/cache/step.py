"""One token per row in the cache of a layer, for any storage: evict, write, attend and update the score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import slots
from kvjax.cache.dense import Dense
from kvjax.cache.paged.storage import Paged
from kvjax.policies.policy import Policy
from kvjax.policies.score import takes_attention
from kvjax.policies.stats import is_ask, of_own_heads, questions, sums_over
from kvjax.types import Evicted, New, PyTree
from pallas_kernels.attention import LowRank, Partial, with_sink

Storage = Dense | Paged


class Pending(NamedTuple):
    """Attention statistics of a layer, before the score is updated with them."""

    asks: PyTree
    answers: Any
    new: New


_Attended = tuple[Storage, Float[Array, "b h g 1 e"], Any]
"""The cache, attention, and the statistics."""


def step(
    policy: Policy, storage: Any, layer: int, new: New, *, alone: bool = False
) -> tuple[Storage, Float[Array, "b h g 1 e"], list[Pending]]:
    """Give the new tokens slots, attend from them, and update the score: a decode step in the cache of one layer.

    A row of padding changes nothing. `alone` is True if the caller combines no statistics of devices, so that they need
    a collective of their own. Also return attention over slots, evicted pairs and the sink, and the statistics that
    have to be summed over devices or layers before they update the score.
    """
    if policy.score.requires.host_memory:
        storage = storage.moved(layer, jax.memory.Space.Device)

    asks = policy.score.asks(storage.layers[layer], new)
    # If output weights also sum over slots, statistics of heads need a collective of their own.
    if not alone and new.spread.heads > 1 and new.spread.outputs == 1:
        asks = of_own_heads(asks)
    done = _in_one_pass(policy, storage, layer, new, asks)
    storage, out, answers = done or _in_two_passes(policy, storage, layer, new, asks)
    if sums_over(asks, "model") or sums_over(asks, "device"):
        return storage, out, [Pending(asks, answers, new)]
    storage = update_score(policy, storage, layer, asks, answers, new)
    if questions(asks)[0]:
        storage, out = storage.with_scores(layer, out)
    if policy.score.requires.host_memory:
        storage = storage.moved(layer, jax.memory.Space.Host)
    return storage, out, []


def _in_one_pass(policy: Policy, storage: Any, layer: int, new: New, asks: PyTree) -> _Attended | None:
    # A kernel that reads keys and values once for both; None if there is none for this storage, policy or platform.
    if policy.selection is not None or not isinstance(storage, Dense):
        return None
    with jax.named_scope("attention"):
        done = storage.exchange_and_attend(policy, layer, new, asks)
    if done is None:
        return None
    storage, found, evicted = done
    partial = with_sink(found.partial, new.sink_logits)
    if evicted is None:
        return storage, partial.out, found.answers
    assert policy.residual is not None  # only a residual requests the evicted pair
    with jax.named_scope("residual"):
        # Absorbed late, to the same effect: the residual has its own state.
        state, out = policy.residual.step(storage.layers[layer].state.residual, evicted, new, partial)
        return storage.put_state(layer, residual=state), out, found.answers


def _in_two_passes(policy: Policy, storage: Any, layer: int, new: New, asks: PyTree) -> _Attended:
    storage, _ = exchange(policy, storage, layer, new)
    remembered = share_of_residual(policy, storage, layer, new)
    with jax.named_scope("attention"):
        storage, found = storage.attend(policy, layer, new, asks, remembered)
        out = with_sink(found.partial, new.sink_logits).out
    return storage, out, found.answers


def steps(policy: Policy, storage: Any, layer: int, new: New) -> tuple[Storage, Float[Array, "b h g t e"]]:
    """Run a `step` for each of some known tokens, one after another, in the cache of one layer.

    None of the statistics that the policy requests is a sum over layers.
    """

    def one(i: Int[Array, ""], carry: tuple[Any, Array]) -> tuple[Any, Array]:
        storage, out = carry
        storage, attended, _ = step(policy, storage, layer, new.part(i, 1), alone=True)
        return storage, jax.lax.dynamic_update_slice_in_dim(out, attended.astype(out.dtype), i, axis=3)

    out = jnp.zeros((*new.q.shape[:4], new.v.shape[-1]), new.v.dtype)
    return jax.lax.fori_loop(0, new.counts.max(), one, (storage, out))


def exchange(policy: Policy, storage: Any, layer: int, new: New, *, pairs: bool = False) -> tuple[Any, Evicted]:
    """Write one token per row into a slot of each head, and let the residual absorb the evicted pairs.

    Return the evicted pairs, too. Without a residual they are empty, unless `pairs` is True.
    """
    with jax.named_scope("eviction"):
        storage, evicted = storage.exchange(policy, layer, new, pairs=pairs or policy.residual is not None)
    if policy.residual is None:
        return storage, evicted
    with jax.named_scope("residual"):
        remembered = policy.residual.absorb(storage.layers[layer].state.residual, evicted)
        return storage.put_state(layer, residual=remembered), evicted


def update_score(policy: Policy, storage: Any, layer: int, asks: PyTree, answers: Any, new: New) -> Any:
    """Update a layer's score after attention, with the requested statistics."""
    if asks is None or not (questions(asks)[0] or takes_attention(type(policy.score))):
        return storage
    heads = storage.layers[layer]
    with jax.named_scope("scores"):
        advanced = policy.score.advance(heads, new)
        if not policy.score.requires.keeps_idle_rows:
            advanced = slots.where_read(new, advanced, heads.state.score)
        storage = storage.fold(policy, layer, asks, answers, new)
    return storage if advanced is None else storage.put_state(layer, score=advanced)


def share_of_residual(policy: Policy, storage: Storage, layer: int, new: New) -> LowRank | Partial | None:
    """Return the attention of the new queries to evicted pairs, as the residual has it; None without a residual."""
    with jax.named_scope("residual"):
        return None if policy.residual is None else policy.residual.share(storage.layers[layer].state.residual, new)


def sum_over_layers(pending: Sequence[Pending]) -> list[Pending]:
    """Replace the statistics that are requested over all layers by their sums over the layers."""
    if not pending:
        return []
    answers = [told.answers for told in pending]

    def total(ask: Any, *found: Any) -> Any:
        return sum(found) if sums_over(ask, "model") else None

    def choose(ask: Any, whole: Any, own: Any) -> Any:
        return whole if sums_over(ask, "model") else own

    totals = jax.tree.map(total, pending[0].asks, *answers, is_leaf=is_ask)
    return [
        told._replace(answers=jax.tree.map(choose, told.asks, totals, told.answers, is_leaf=is_ask)) for told in pending
    ]
