"""Attention over a layer's slots, with the statistics that a policy's parts request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.evict import Attended
from kvjax.cache.query_shard import QueryShard
from kvjax.cache.recompute import (
    by_blocks,
    narrowed,
    near_sums,
    newest_attention,
    replayed_stats,
    select_by_blocks,
)
from kvjax.cache.stats import (
    normalised,
    sample_noise,
    seen_slots,
    stat_from_probs,
    stats_from_probs,
    summed,
    tempered,
)
from kvjax.policies.codec import Codec, Operands
from kvjax.policies.policy import Policy
from kvjax.policies.residual import Selection
from kvjax.policies.stats import (
    AttentionProbs,
    AttentionSum,
    Damage,
    LocalAttention,
    Noise,
    Peak,
    ReplayedQueries,
    StatRequest,
    flatten_requests,
    is_request,
    over_heads,
)
from kvjax.types import SLOTS, LayerTokens, PyTree, View, wide
from pallas_kernels.attention import LowRank, Partial, merge, share_of_evicted
from pallas_kernels.decode_attention import Decoded, ScoreNoise, decode_attention
from pallas_kernels.noise import layer_seed
from pallas_kernels.prefill_attention import prefill_attention

SoftmaxKind = tuple[Any, Noise | None]
"""Temperature and noise of a softmax whose weighted sums one kernel pass computes, for any number of weights."""


def attend_slots(
    policy: Policy,
    view: View,
    new: LayerTokens,
    requests: PyTree,
    evicted: LowRank | Partial | None,
    *,
    block: bool = False,
) -> Attended:
    """Attend from new tokens, which have slots already, to all slots of a layer.

    Args:
        requests: statistics that are computed in the same pass.
        evicted: attention to evicted pairs, from a residual.
        block: True if the new tokens are a block of text.
    """
    operands = policy.codec.operands(view, new, block=block)
    if operands.k is not new.k:  # a whole text has no slots with a bias yet
        new, operands = operands.with_bias(new, policy.slot_bias(view))
    attend_new = attend_block if block else attend_token
    partial, stats = attend_new(operands, view, new, without_replayed(requests), evicted, policy.selection)
    return Attended(partial, with_replayed(requests, stats, policy.codec, operands, view, new))


def without_replayed(requests: PyTree) -> PyTree:
    """Return the requests about the new tokens' own attention, with `()` in place of replayed queries."""
    return jax.tree.map(
        lambda request: () if isinstance(request, ReplayedQueries) else request, requests, is_leaf=is_request
    )


def with_replayed(
    requests: PyTree, stats: PyTree, codec: Codec, operands: Operands, view: View, new: LayerTokens
) -> PyTree:
    """Add the statistics of replayed queries to those of the requests from `without_replayed`."""

    def stat_of(request: StatRequest, stat: PyTree) -> PyTree:
        return replayed_stats(codec, operands, view, new, request) if isinstance(request, ReplayedQueries) else stat

    return jax.tree.map(stat_of, requests, stats, is_leaf=is_request)


def attend_token(
    operands: Operands,
    view: View,
    new: LayerTokens,
    requests: PyTree,
    evicted: LowRank | Partial | None,
    selection: Selection | None,
) -> tuple[Partial, PyTree]:
    """Attend from one token per row to its slots, and compute the requested statistics.

    Statistics are those of the softmax over the slots: neither evicted pairs nor a learned sink are in it. Kernels take
    attention over evicted tokens if it is of low rank.
    """
    in_kernel = selection is None and new.spread.slots == 1
    scores, summed = (
        kernel_scores(requests, new)
        if in_kernel
        else ("each" if selection or flatten_requests(requests)[0] else None, False)
    )
    low_rank = evicted if in_kernel and isinstance(evicted, LowRank) else None
    attention = decode_attention(
        operands.q[:, :, :, 0],
        *operands.stored_once,
        view.position,
        new.position[:, 0],
        new.config.spec,
        places=operands.token_places,
        low_rank=None if low_rank is None else low_rank._replace(features=low_rank.features[:, :, :, 0]),
        sinks=operands.sinks,
        scores=scores,
    )
    if new.spread.slots > 1:
        return _attend_sharded(attention, operands, view.position, new, requests, evicted, selection)
    partial = attention.partial
    if selection is not None:
        assert attention.scores is not None
        probs, lse = attention.scores[:, :, :, None], attention.lse[..., None]
        partial = narrowed(selection, probs, operands.v, view.position, new, lse)
    if low_rank is None:
        partial = with_evicted(partial, evicted)
    return partial, requested_stats(requests, attention, operands, view.position, new, summed=summed)


def kernel_scores(requests: PyTree, new: LayerTokens) -> tuple[str | ScoreNoise | None, bool]:
    """Return the scores that a kernel must compute for one token per row, and whether it sums them as requested."""
    leaves, _ = flatten_requests(requests)
    if any(isinstance(request, LocalAttention) for request in leaves):
        raise ValueError("LocalAttention needs a prompt that is read as a whole, not a single token.")
    kinds = {_softmax_kind(request, prompt=False) for request in leaves}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None:
        return ("each" if leaves else None), False
    return ("sum" if kind == (1.0, None) else _gumbel(leaves[0], new)), True


def requested_stats(
    requests: PyTree,
    output: Decoded,
    operands: Operands,
    position: Int[Array, "b h c"],
    new: LayerTokens,
    *,
    summed: bool,
) -> PyTree:
    """Compute the requested statistics of one token per row from the kernel scores that `kernel_scores` chose."""
    leaves, tree = flatten_requests(requests)
    if not leaves:
        return requests
    assert output.scores is not None
    if summed:
        return tree.unflatten(_of_one_query(request, output.scores, new) for request in leaves)
    return stats_from_probs(requests, output.scores[:, :, :, None], operands.v, position, new)


def _of_one_query(request: StatRequest, sums: Float[Array, "b h c"], new: LayerTokens) -> Float[Array, "b h c"]:
    assert isinstance(request, AttentionSum)
    return over_heads(request, sums if request.weights is None else sums * request.weights.astype(sums.dtype), new)


def _attend_sharded(
    attention: Decoded,
    operands: Operands,
    position: Int[Array, "b h c"],
    new: LayerTokens,
    requests: PyTree,
    evicted: LowRank | Partial | None,
    selection: Selection | None,
) -> tuple[Partial, PyTree]:
    # Returns attention of heads that share their slots with other devices, and the statistics of this device's slots.
    # Only the output features that this device's output weights read are valid.
    # One collective carries log-sum-exps, counts and, without a selection, outputs.
    leaves, tree = flatten_requests(requests)
    local = None if attention.scores is None else attention.scores[:, :, :, None]
    powers: dict[int, Array] = {}
    terms, kind = [attention.lse], attention.lse.dtype
    for i, request in enumerate(leaves):
        if isinstance(request, AttentionSum) and not request.plain:
            # This softmax is sharded, too; its numerators are powers of the plain softmax's probabilities.
            assert local is not None
            powers[i] = tempered(request, local, position, new)
            tau = jnp.asarray(request.tau, kind)
            lse = jnp.where(jnp.isfinite(attention.lse), attention.lse, 0.0) / (tau[:, :, None] if tau.ndim else tau)
            terms.append(jnp.log(powers[i].sum((-2, -1))) + lse)
    sums = len(terms)
    if any(isinstance(request, AttentionProbs) for request in leaves):
        terms.append(jnp.broadcast_to(seen_slots(position, new).sum(-1), attention.lse.shape).astype(kind))
    local_terms = jnp.stack(terms, axis=-1)
    rows, heads, groups, width = attention.out.shape
    if selection is None:
        all_terms, features = new.spread.of_slots(local_terms.reshape(rows, -1), attention.out.reshape(rows, -1))
        all_terms = all_terms.reshape(-1, *local_terms.shape)
    else:
        all_terms, features = jax.lax.all_gather(local_terms, SLOTS), None
    totals = jax.nn.logsumexp(all_terms[..., :sums], axis=0)
    shares = _fraction(local_terms[..., :sums], totals)
    lse, probs = totals[..., 0], None if local is None else local * shares[..., :1, None]
    if features is not None:
        parts = _fraction(all_terms[..., 0], lse)[..., None]
        parts = jnp.broadcast_to(parts, (*parts.shape[:-1], width)).reshape(len(all_terms), rows, -1)
        out = new.spread.all_features((new.spread.own_features(parts) * features).sum(0))
        out = out.reshape(rows, heads, groups, 1, width)
    else:
        assert probs is not None and selection is not None
        out, lse = narrowed(selection, probs, operands.v, position, new, lse[..., None])
        out, lse = new.spread.over_slots(out), lse[..., 0]
    partial = with_evicted(Partial(out, lse[..., None]), evicted)  # which is replicated on these devices

    def local_stat(i: int, request: StatRequest) -> Any:
        assert probs is not None
        if i not in powers:
            visible = (
                all_terms[..., sums].sum(0)[..., :1].astype(jnp.int32) if isinstance(request, AttentionProbs) else None
            )
            return stat_from_probs(request, probs, operands.v, position, new, visible)
        assert isinstance(request, AttentionSum)
        local_probs = normalised(powers[i], powers[i].sum(-1, keepdims=True))
        share = shares[..., 1 + list(powers).index(i), None, None]
        return over_heads(request, summed(request, share * local_probs), new)

    return partial, tree.unflatten(local_stat(i, request) for i, request in enumerate(leaves))


def _fraction(part: Float[Array, "*n"], total: Float[Array, "*n"]) -> Float[Array, "*n"]:
    # Returns the fraction of a sum that a part of it makes up, from the logarithms of both.
    return jnp.where(jnp.isfinite(part), jnp.exp(part - jnp.where(jnp.isfinite(total), total, 0.0)), 0.0)


def with_evicted(attended: Partial, evicted: LowRank | Partial | None) -> Partial:
    """Merge attention over slots with that to evicted tokens, if there is one."""
    return attended if evicted is None else merge(attended, share_of_evicted(evicted))


def attend_block(
    operands: Operands,
    view: View,
    new: LayerTokens,
    requests: PyTree,
    evicted: LowRank | Partial | None,
    selection: Selection | None,
) -> tuple[Partial, PyTree]:
    """Attend from a block of a text to all slots, of which the last hold the block; see `attend_token`."""
    leaves, tree = flatten_requests(requests)
    kinds = [_softmax_kind(request, prompt=True) for request in leaves]
    fused = next((kind for kind in kinds if kind is not None), None)
    together = [i for i, kind in enumerate(kinds) if kind is not None and kind == fused]
    shard = QueryShard.of(operands, new)
    rows, weights = _stacked([shard.weighed(leaves[i]) for i in together], shard.new) if together else ([], None)
    tau, noise = fused or (1.0, None)
    attention = prefill_attention(
        shard.operands.q,
        operands.k,
        operands.v,
        shard.new.position,
        view.position,
        new.config.spec,
        places=shard.operands.places,
        scores=fused is not None,
        weights=weights,
        noise=None if noise is None else sample_noise(noise, view.position, new, wide(new.q.dtype)),
        tau=tau,
        query_tokens=shard.query_tokens,
    )
    partial = Partial(attention.out, attention.lse)
    lse = shard.gather(attention.lse, 3)
    stats: dict[int, Any] = {}
    sums = None if attention.scores is None else new.spread.over_queries(attention.scores)
    for i, row in zip(together, rows, strict=True):
        assert sums is not None
        stats[i] = over_heads(leaves[i], sums[:, :, row], new)
    recomputed = [
        i for i, request in enumerate(leaves) if isinstance(request, AttentionSum | Damage | Peak) and i not in stats
    ]
    if recomputed:
        more = by_blocks(shard.operands, view, shard.new, [shard.weighed(leaves[i]) for i in recomputed], partial.lse)
        for i, part in zip(recomputed, more, strict=True):
            combine = new.spread.most_of_queries if isinstance(leaves[i], Peak) else new.spread.over_queries
            stats[i] = over_heads(leaves[i], combine(part), new)
    for i, request in enumerate(leaves):
        if isinstance(request, LocalAttention):
            if view.capacity != new.position.shape[1]:
                raise ValueError("LocalAttention needs a prompt that is read as a whole, not a part of it.")
            stats[i] = near_sums(new, lse, request)
        elif isinstance(request, AttentionProbs):
            stats[i] = newest_attention(operands, view, new, request, lse)
    if selection is not None:
        partial = select_by_blocks(shard.operands, view, shard.new, selection, partial)
        lse = shard.gather(partial.lse, 3)
    partial = with_evicted(Partial(shard.gather(partial.out, 3), lse), evicted)
    return partial, tree.unflatten(stats[i] for i in range(len(leaves)))


def _softmax_kind(request: StatRequest, prompt: bool) -> SoftmaxKind | None:
    # Returns the softmax for a kernel, or None: kernels sum over a group, with one noise value per key.
    if (
        not isinstance(request, AttentionSum)
        or request.group != "sum"
        or (request.noise is not None and request.noise.fresh)
    ):
        return None
    if prompt and not isinstance(request.tau, float):
        return None
    return request.tau if isinstance(request.tau, float) else id(request), request.noise


def _gumbel(request: StatRequest, new: LayerTokens) -> ScoreNoise:
    assert isinstance(request, AttentionSum)
    tau = jnp.asarray(request.tau)
    tau = tau[:, 0] if tau.ndim else jnp.full(new.seed.shape, tau)
    # The layer's number is in the seed, so that layers share the kernel.
    seed, kind = layer_seed(new.seed, new.layer), "none" if request.noise is None else request.noise.kind
    return ScoreNoise(seed, tau, 0, kind, None if new.head is None else new.head[:, 0])


def _stacked(requests: Sequence[StatRequest], new: LayerTokens) -> tuple[list[int], Float[Array, "b #h m t"] | None]:
    # Stacks one row of weights per request; requests that weight all queries equally share a row.
    if all(isinstance(request, AttentionSum) and request.weights is None for request in requests):
        return [0] * len(requests), None
    kind, equally = (
        wide(new.q.dtype),
        any(isinstance(request, AttentionSum) and request.weights is None for request in requests),
    )
    stack = [jnp.ones((new.position.shape[0], 1, new.position.shape[1]), kind)] if equally else []
    rows: list[int] = []
    for request in requests:
        assert isinstance(request, AttentionSum)
        rows.append(0 if request.weights is None else len(stack))
        if request.weights is not None:
            stack.append(request.weights.astype(kind))
    heads = max(row.shape[1] for row in stack)
    shape = (stack[0].shape[0], heads, stack[0].shape[2])
    return rows, jnp.stack([jnp.broadcast_to(row, shape) for row in stack], axis=2)
