"""A decode step over a layer's slots in one kernel, which reads keys and values once: evict, write and attend."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.attention import kernel_scores, requested_stats, with_replayed, without_replayed
from kvjax.cache.evict import Attended, Ranks, evicted_pairs
from kvjax.policies.codec import Operands
from kvjax.policies.policy import Policy
from kvjax.policies.score import AccumulatedScore
from kvjax.types import KV, Evicted, LayerTokens, PyTree, View
from pallas_kernels.fused_decode import Query, Slots, Token, fused_decode, one_pass
from pallas_kernels.fused_decode import Ranking as Choice


class FusedStep(NamedTuple):
    """Arguments of the kernel, for one token per row."""

    policy: Policy
    view: View
    """Slots from `Slots.prepared`."""
    new: LayerTokens
    requests: PyTree
    ranking: Ranks
    operands: Operands

    @property
    def supported(self) -> bool:
        """True if a kernel runs this step here, and one kernel is faster than two."""
        k, v = self.operands.stored
        scores, _ = self._scores
        query = Query(self.operands.q[:, :, :, 0], self.new.config.spec, self.operands.sinks)
        queries = query, query._replace(scores=scores)
        return self.operands.places is None and all(one_pass(it, k, v, self.ranking.hashed) for it in queries)

    @property
    def _scores(self) -> tuple[Any, bool]:
        return kernel_scores(without_replayed(self.requests), self.new)

    def __call__(self) -> tuple[Any, Attended, Evicted | None]:
        """Return the slots with the new token, attention to them, and the evicted pairs for a residual.

        Statistics are None if scores include them already.
        """
        policy, view, new, requests, ranking, operands = self
        scores, summed = self._scores
        token = {"kv": policy.codec.numbers(new, view.state.codec), "slots": policy.slots(new, view.state)}
        token = jax.tree.map(lambda leaf: leaf[:, :, 0], token)
        before = view.slots.score
        adds = isinstance(policy.score, AccumulatedScore) and policy.score.only_adds(requests, new)
        adds &= summed and ranking.scores is before and before.dtype == jnp.float32
        stats, states, token_states = None, view.slots, token["slots"]
        if adds or ranking.hashed is not None:  # the kernel itself writes the score's state
            states, token_states = states.replace(score=None), token_states.replace(score=None)
        step = fused_decode(
            Slots(view.position, *operands.stored, states),
            Token(new.position[:, 0], token["kv"].k, token["kv"].v, token_states),
            Choice(ranking.hashed or ranking.scores, ranking.rules, ranking.keep, policy.may_shrink),
            Query(operands.q[:, :, :, 0], new.config.spec, operands.sinks, scores),
            pairs=policy.residual is not None,
            adds=adds,
            rounds=policy.residual is None,
        )
        position, k, v, states = step.slots
        if step.codes is not None:
            states = states.replace(score=step.codes)
        if adds:
            states = states.replace(score=step.attended.scores)
        after = view.replace(position=position, kv=view.kv.replace(k=k, v=v), slots=states)
        if not adds:
            operands = operands._replace(k=k, v=v)
            stats = requested_stats(without_replayed(requests), step.attended, operands, position, new, summed=summed)
            stats = with_replayed(requests, stats, policy.codec, operands, after, new)
        evicted = None if step.pair is None else evicted_pairs(view.state, new, KV(*step.pair), step.evicted_position)
        return after, Attended(step.attended.partial, stats), evicted


def may_fuse(policy: Policy, view: View, new: LayerTokens) -> bool:
    """Return whether a policy's step over these slots can be one kernel here; its operands decide about the rest.

    If the codec tracks the order of slots, the positions of keys are known only after the eviction.
    """
    codec, q = policy.codec, new.q
    if codec.ordered or not codec.encoded_by_kernels or policy.selection is not None or view.kv.v is None:
        return False
    if policy.slot_bias(view) is not None:
        return False
    query: Any = jax.ShapeDtypeStruct((*q.shape[:3], q.shape[-1]), q.dtype)
    return one_pass(Query(query, new.config.spec), view.kv.k, view.kv.v)
