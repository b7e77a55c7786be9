"""Contract of parts: what each member of a policy's parts returns for abstract tokens of one layer."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.policies.allocation import Plan
from kvjax.policies.base import Part
from kvjax.policies.policy import Policy
from kvjax.policies.protection import Protected, Quota
from kvjax.policies.quantizer import Quantizer
from kvjax.policies.rankings import HammingDistance, OldestFirst, SplitRanking
from kvjax.policies.residual import Queries, Residual, Rewritten, SlotResidual
from kvjax.policies.score import takes_attention
from kvjax.policies.stats import (
    AttentionProbs,
    AttentionSum,
    LocalAttention,
    Noise,
    Peak,
    ReplayedQueries,
    Seen,
    StatRequest,
    flatten_requests,
    is_request,
)
from kvjax.types import Evicted, Heads, LayerTokens, Partial, Parts, PyTree, View, wide
from pallas_kernels.attention import LowRank

_FLOAT, _INT, _BOOL = (jnp.floating, "floating-point numbers"), (jnp.integer, "integers"), (jnp.bool_, "booleans")
_OTHER_HEADS = 2
"""Layers whose heads a plan under `Sizing.all_layers` sees side by side."""


def check_layer(policy: Policy, shape: LayerTokens, block: LayerTokens, token: LayerTokens) -> None:
    """Refuse a policy of which a member's result has another form than its declaration in the part's interface.

    Args:
        policy: the policy as one layer uses it.
        shape: no tokens.
        block: a prompt.
        token: a generated token.

    Raises:
        ValueError: a result has another shape or dtype; the message names the member.
        TypeError: a member needs the value of a traced array.
    """
    rows, heads = shape.k.shape[:2]
    _check_quantizer(policy.codec.quantizer, block)
    state = policy.of_parts(lambda part: _call(part, "init_head", shape))
    per_head = policy.plan.sizing.per_head or shape.spread.heads > 1
    lead, letters = ((rows, heads), "b h ...") if per_head else ((rows,), "b ...")
    for name, part in _parts(policy):
        _check_lead(part, "init_head", getattr(state, name), lead, letters)
    slots = _checked_slots(policy, state, block)
    for new in (shape, token):
        other_slots = _checked_slots(policy, state, new)
        for name, part in _parts(policy):
            what = f"as for {block.k.shape[2]} tokens"
            _check_same(part, "init_slot", getattr(other_slots, name), getattr(slots, name), what, skip=2)
    limit = jnp.full((rows, heads), block.k.shape[2], jnp.int32)
    position = jnp.broadcast_to(block.position[:, None], block.k.shape[:3]).astype(jnp.int32)
    view = View(limit, state, policy.codec.encode(block, state.codec), position, slots)
    if policy.score.requires.replay is not None:
        _updated(policy, view, block.replace(replayed=True))
    for new in (block, token):
        after = _updated(policy, view, new)
        _check_ranking(policy, after, new)
        _check_protection(policy, after, new)
        if policy.residual is not None:
            _check_residual(policy.residual, after, new)
        if policy.selection is not None:
            probs = jnp.zeros((*new.q.shape[:4], view.capacity), wide(new.q.dtype))
            mask = _call(policy.selection, "pick", probs, new)
            _check(policy.selection, "pick", mask, probs.shape, "b h g t c", _BOOL)
    _check_plan(policy, view, block)
    if policy.plan.sizing.per_head:
        _check_pages(policy, view, token)


def _parts(policy: Policy) -> list[tuple[str, Part]]:
    parts = [(field.name, getattr(policy, field.name)) for field in dataclasses.fields(Parts)]
    return [(name, part) for name, part in parts if part is not None]


def _checked_slots(policy: Policy, state: Parts, new: LayerTokens) -> Parts:
    slots = policy.of_parts(lambda part: _call(part, "init_slot", new, state))
    for name, part in _parts(policy):
        _check_lead(part, "init_slot", getattr(slots, name), new.k.shape[:3], "b h t ...")
    return slots


def _call(part: Part, member: str, *arguments: Any) -> Any:
    """Call a member of a part; explain the TypeError of one that uses a traced array as a Python number."""
    try:
        return getattr(part, member)(*arguments)
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
    ) as error:
        traced = [field.name for field in dataclasses.fields(part) if jax.tree.leaves(getattr(part, field.name))]  # type: ignore[arg-type]
        advice = f"declare a setting ({', '.join(traced)}) with kvjax.types.setting; " if traced else ""
        raise TypeError(
            f"{type(part).__name__}.{member} takes an array for a number of Python ({str(error).splitlines()[0]}); "
            f"{advice}where that is new.layer, override layer(index) instead, which is called with each layer's number."
        ) from error


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _described(tree: PyTree) -> str:
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)
    shapes = [f"{leaf.dtype} of shape {list(leaf.shape)}" if _is_array(leaf) else repr(leaf) for leaf in leaves]
    return ", ".join(shapes) or "nothing"


def _refuse(part: Part, member: str, value: PyTree, expected: str) -> None:
    raise ValueError(f"{type(part).__name__}.{member} gives {_described(value)}, not {expected}.")


def _check(
    part: Part, member: str, value: Any, shape: tuple[int, ...], letters: str, kind: Any, scalar: bool = False
) -> None:
    """Refuse a result that is no array of a shape and a kind; a `scalar` stands for an array of equal numbers."""
    shapes = [shape, ()] if scalar else [shape]
    if not _is_array(value) or value.shape not in shapes or not jnp.issubdtype(value.dtype, kind[0]):
        expected = " or ".join(str(list(option)) for option in shapes)
        _refuse(part, member, value, f"{kind[1]} of shape {expected} [{letters}]")


def _check_lead(part: Part, member: str, value: PyTree, lead: tuple[int, ...], letters: str) -> None:
    """Refuse a tree with a leaf that is no array, or whose first axes are others."""
    if not all(_is_array(leaf) and leaf.shape[: len(lead)] == lead for leaf in jax.tree.leaves(value)):
        _refuse(part, member, value, f"arrays whose shapes begin with {list(lead)} [{letters}]")


def _check_same(part: Part, member: str, value: PyTree, before: PyTree, what: str, skip: int | None = None) -> None:
    """Refuse a tree of another structure, or with a leaf of another dtype or shape; the axis `skip` may differ."""

    def forms(tree: PyTree) -> list[Any]:
        shapes = [(leaf, list(leaf.shape) if _is_array(leaf) else []) for leaf in jax.tree.leaves(tree)]
        return [
            (leaf.dtype if _is_array(leaf) else None, shape[:skip], [] if skip is None else shape[skip + 1 :])
            for leaf, shape in shapes
        ]

    if jax.tree.structure(value) != jax.tree.structure(before) or forms(value) != forms(before):
        _refuse(part, member, value, f"{what}: {_described(before)}")


def _check_quantizer(quantizer: Quantizer, new: LayerTokens) -> None:
    scales = _call(quantizer, "init_scales", new.k, new.valid[:, None])
    if scales is not None:
        _check(quantizer, "init_scales", scales, (*new.k.shape[:2], new.k.shape[3]), "b h d", _FLOAT)
    for x in (new.k, new.v):
        stored = _call(quantizer, "encode", x)
        _check_lead(quantizer, "encode", stored, x.shape[:3], "b h c ...")
        for dtype in {x.dtype, wide(x.dtype)}:
            decoded = _call(quantizer, "decode", stored, dtype)
            _check(quantizer, "decode", decoded, x.shape, "b h c d", (dtype, str(jnp.dtype(dtype))))


def _updated(policy: Policy, view: View, new: LayerTokens) -> View:
    """Return the slots after attention, as a score changes them."""
    score = policy.score
    requests = _call(score, "attention_stats", view, new)
    _check_requests(score, requests, new)
    if requests is None or not (flatten_requests(requests)[0] or takes_attention(type(score))):
        return view
    advanced = _call(score, "update_head", view, new)
    _check_same(score, "update_head", advanced, view.state.score, "what its state began with")
    folded = _folded(policy, requests, view, new)
    return view.replace(state=view.state.replace(score=advanced), slots=view.slots.replace(score=folded))


def _folded(policy: Policy, requests: PyTree, view: View, new: LayerTokens) -> PyTree:
    folded = _call(policy.score, "update_slot", _stats_like(requests, view, new), view, new)
    _check_same(policy.score, "update_slot", folded, view.slots.score, "what its slot began with")
    return folded


def _check_requests(part: Part, requests: PyTree, new: LayerTokens) -> None:
    (rows, heads, groups, tokens, width), name = new.q.shape, type(part).__name__

    def check(request: StatRequest, field: str, shapes: list[tuple[int, ...]], letters: str) -> None:
        value = getattr(request, field)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if getattr(value, "shape", () if number else None) not in shapes:
            expected = " or ".join(str(list(option)) for option in shapes)
            raise ValueError(
                f"{name}.attention_stats requests {type(request).__name__} with {field}={_described(value)}, not of "
                f"shape {expected} [{letters}]."
            )

    for request in flatten_requests(requests)[0]:
        if isinstance(request, ReplayedQueries):
            stored = request.raw_q.shape[2] if _is_array(request.raw_q) and request.raw_q.ndim == 5 else 0
            check(request, "raw_q", [(rows, heads, stored, groups, width)], "b h a g d")
            check(request, "position", [(rows, stored)], "b a")
            check(request, "weights", [(rows, heads, stored)], "b h a")
            if request.newest is not None:
                check(request, "newest", [(rows,)], "b")
        elif isinstance(request, LocalAttention):
            if request.width is not None:
                check(request, "width", [(rows, tokens)], "b t")
        elif not isinstance(request, AttentionProbs):
            if request.weights is not None:
                check(request, "weights", [(rows, 1, tokens), (rows, heads, tokens)], "b h t")
            if isinstance(request, AttentionSum):
                check(request, "tau", [(), (rows, tokens)], "b t")
                if not isinstance(request.noise, Noise | None):
                    raise ValueError(
                        f"{name}.attention_stats requests AttentionSum with noise={request.noise!r}, not a kvjax.Noise "
                        "or None."
                    )


def _stats_like(requests: PyTree, view: View, new: LayerTokens) -> PyTree:
    """Return arrays in the form of the statistics that a score requests."""
    rows, heads, groups, tokens = new.q.shape[:4]
    kind, slots = wide(new.q.dtype), view.capacity

    def stat(request: StatRequest) -> Any:
        if isinstance(request, AttentionProbs):
            count = min(request.newest, tokens)
            mask, at = jnp.zeros((rows, heads, count, slots), bool), jnp.zeros((rows, count), jnp.int32)
            return Seen(jnp.zeros((rows, heads, groups, count, slots), kind), at, mask.sum(-1), mask)
        return jnp.zeros((rows, heads, groups, slots) if isinstance(request, Peak) else (rows, heads, slots), kind)

    return jax.tree.map(stat, requests, is_leaf=is_request)


def _check_ranking(policy: Policy, view: View, new: LayerTokens) -> None:
    ranking = _call(policy.score, "score", view, new)
    if isinstance(ranking, (OldestFirst, HammingDistance)):
        return
    for scores in (ranking.within, ranking.between) if isinstance(ranking, SplitRanking) else (ranking,):
        _check(policy.score, "score", scores, view.position.shape, "b h c", _FLOAT)


def _check_protection(policy: Policy, view: View, new: LayerTokens) -> None:
    part = policy.protection
    protected = _call(part, "guard", view, new)
    if not isinstance(protected, Protected):
        _refuse(part, "guard", protected, "a kvjax.policies.Protected")
    check = functools.partial(_check, part)
    for name in ("sinks", "recent"):
        check(f"guard(...).{name}", getattr(protected, name), view.limit.shape, "b h", _INT, scalar=True)
    for name in ("keep", "last"):
        if getattr(protected, name) is not None:
            check(f"guard(...).{name}", getattr(protected, name), view.position.shape, "b h c", _BOOL)
    if isinstance(protected.quota, Quota):
        check("guard(...).quota.limit", protected.quota.limit, view.limit.shape, "b h", _INT)
    elif protected.quota is not None:
        _refuse(part, "guard(...).quota", protected.quota, "a kvjax.policies.Quota, or None")


def _check_plan(policy: Policy, view: View, new: LayerTokens) -> None:
    plan, sizing = policy.plan, policy.plan.sizing
    _check(plan, "slots_at", _call(plan, "slots_at", view.limit, new.length), view.limit.shape, "b h", _INT)
    requests = _call(plan, "attention_stats", view, new)
    _check_requests(plan, requests, new)
    stats, heads, ranks = _stats_like(requests, view, new), view, jnp.zeros(view.position.shape, wide(new.q.dtype))
    if sizing.all_layers:
        limit, ranks = (jnp.concatenate([x] * _OTHER_HEADS, axis=1) for x in (view.limit, ranks))
        stats, heads = (), Heads(limit=limit, state=Parts())
    ranked = sizing.all_layers or (sizing.per_head and sizing.mode == "budget")
    allocation = _call(plan, "head_budgets", stats, heads, ranks if ranked else None, new)
    if not isinstance(allocation, tuple) or len(allocation) != 2:
        _refuse(plan, "head_budgets", allocation, "a pair of slots [b h] and the plan's state")
    _check(plan, "head_budgets", allocation[0], heads.limit.shape, "b h", _INT)
    if allocation[1] is not None and type(plan).head_budgets is not Plan.head_budgets:
        _check_same(plan, "head_budgets", allocation[1], heads.state.plan, "a state as init returned it")


def _check_residual(residual: Residual, view: View, new: LayerTokens) -> None:
    (rows, heads, groups, tokens), width = new.q.shape[:4], new.v.shape[-1]
    state = view.state.residual
    for count, kind in ((1, wide(new.k.dtype)), (view.capacity, new.k.dtype)):
        keys, values = (jnp.zeros((rows, heads, count, x.shape[-1]), kind) for x in (new.k, new.v))
        evicted = Evicted(keys, values, jnp.zeros((rows, heads, count), jnp.int32), new.layer)
        _check_same(residual, "absorb", _call(residual, "absorb", state, evicted), state, "what its state began with")
    attention = _call(residual, "share", state, new)
    check = functools.partial(_check, residual)
    if isinstance(attention, Partial):
        check("share(...).out", attention.out, (rows, heads, groups, tokens, width), "b h g t e", _FLOAT)
        check("share(...).lse", attention.lse, (rows, heads, groups, tokens), "b h g t", _FLOAT)
    elif isinstance(attention, LowRank):
        rank = attention.z.shape[-1] if _is_array(attention.z) and attention.z.ndim else 0
        check("share(...).features", attention.features, (rows, heads, groups, tokens, rank), "b h g t R", _FLOAT)
        check("share(...).h", attention.h, (rows, heads, rank, width), "b h R e", _FLOAT)
        check("share(...).z", attention.z, (rows, heads, rank), "b h R", _FLOAT)
    elif attention is not None:
        _refuse(residual, "share", attention, "a kvjax.types.Partial, a LowRank, or None")
    if isinstance(residual, SlotResidual) and tokens > 1:
        _check_rewritten(residual, view, new)


def _check_rewritten(residual: SlotResidual, view: View, new: LayerTokens) -> None:
    count = view.capacity // 2
    slots = jax.tree.map(lambda leaf: leaf[:, :, :count], (view.kv, view.position, view.slots))
    after = view.replace(kv=slots[0], position=slots[1], slots=slots[2])
    rewritten = _call(residual, "rewrite", view, after, Queries(new.q, new.valid), new)
    if isinstance(rewritten, Rewritten):
        shape, check = (*new.v.shape[:2], count), functools.partial(_check, residual)
        check("rewrite(...).values", rewritten.values, (*shape, new.v.shape[-1]), "b h c e", _FLOAT)
        check("rewrite(...).bias", rewritten.bias, shape, "b h c", _FLOAT)
    elif rewritten is not None:
        _refuse(residual, "rewrite", rewritten, "a kvjax.policies.Rewritten, or None")


def _check_pages(policy: Policy, view: View, new: LayerTokens) -> None:
    """Check members of a policy whose slots are in pages: each row is a page, with one head."""
    heads = view.limit.shape[1]

    def of_pages(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.reshape(-1, 1, *leaf.shape[2:]), tree)

    paged, names = of_pages(view), ("q", "k", "v", "raw_q", "raw_k")
    rows = ("hidden", "position", "token", "prompt_length", "read", "horizon", "end", "seed")
    changes: dict[str, Any] = {name: of_pages(getattr(new, name)) for name in names}
    changes |= {name: jnp.repeat(getattr(new, name), heads, axis=0) for name in rows}
    head = new.spread.first(heads) + jnp.arange(view.limit.size)[:, None] % heads
    token = new.replace(**changes, head=head, sink_logits=None)
    try:
        if not policy.score.requires.whole_heads:
            _check_ranking(policy, paged, token)
        _check_protection(policy, paged, token)
        requests = policy.score.attention_stats(view, new)
        if requests is not None and takes_attention(type(policy.score)):
            _folded(policy, requests, paged, token)
    except ValueError as error:
        raise ValueError(
            f"plan {type(policy.plan).__name__} stores slots in pages, each a row with one head, whose number is in "
            f"new.head: {error}"
        ) from error
