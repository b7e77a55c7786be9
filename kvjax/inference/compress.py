"""Compression of a filled cache to another budget, or by another policy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from kvjax.cache.layer import LayerCache
from kvjax.cache.pending import Pending
from kvjax.cache.slots import Slots, empty_slots
from kvjax.inference.budget import Budget, checked_budget, lines_of, plan_slots
from kvjax.inference.cache import Bound, Cache
from kvjax.inference.decoder import Decoder, check_step, settle_step
from kvjax.inference.padding import bucket
from kvjax.inference.prepare import Tokens, bind_policy, check_length, check_on_host, check_tokens
from kvjax.inference.press import Asking, Limits, Ranked, held_layers, press, stored
from kvjax.inference.replay import read_again, replayed_queries
from kvjax.inference.sharding import gather_slots, placed_policy, placed_rows, run_on_mesh, scatter_slots, unpacked
from kvjax.inference.state import State, check_state
from kvjax.inference.windows import planned_ends
from kvjax.methods.neighbors import text_order
from kvjax.methods.registry import name_of
from kvjax.methods.registry import policy as policy_by_name
from kvjax.models.decoder import Layer
from kvjax.models.model import ModelOrigin, rows_of
from kvjax.policies.allocation import Plan
from kvjax.policies.policy import Policy
from kvjax.policies.residual import SlotResidual
from kvjax.policies.stats import flatten_requests
from kvjax.types import OF_HEADS, LayerTokens, TokenBatch
from kvjax.utils.dependence import depends_on
from kvjax.utils.modes import on_the_host
from kvjax.utils.processes import on_host

UNKNOWN = {
    "q": "queries",
    "raw_q": "queries",
    "raw_k": "keys before rotation",
    "hidden": "hidden states",
    "token": "token ids",
}
"""Data of tokens that a cache does not hold."""


@on_the_host
def compress(
    state: State,
    policy: Policy | str | None = None,
    budget: Budget = 1.0,
    *,
    text: Tokens | None = None,
    plan: Plan | str | None = None,
    budget_of: str = "text",
) -> State:
    """Compress a filled cache to another budget, or by another policy.

    Use it to read a prompt once under `full` and compress it by several policies, or to change the budget of a
    conversation. Tokens that an earlier policy evicted do not return.

    Args:
        state: from `prefill` or a later call; it stays valid.
        policy: ranks the slots from now on; a name, a `Policy`, or None for the state's own. Another policy must rank
            by what a cache holds (keys, values, positions), as `keydiff` does, and all heads of a layer must hold the
            same tokens, as under `full`.
        budget: slots per KV head, a fraction, or slots for each layer; it may be larger than before.
        text: token ids of a text for each row, for a policy that reads one over the cache: [b, n], or a list of lists.
            `kvzip` takes the text that the cache holds, and reads it after its own request, for which it needs the
            tokenizer of the state's model. The residual
            `attention_matching` takes the queries of any text, such as a request to repeat the context and the context
            again. None if the policy reads none, or did so before.
        plan: distribution of the budget over layers or heads; None for the policy's own.
        budget_of: base of a fractional budget, see `kvjax.prefill`.

    Raises:
        ValueError: the policy needs data that a cache does not hold, or the budget or the text does not fit the policy.

    Example:
        >>> model = kvjax.load("tiny")
        >>> whole, logits = kvjax.prefill(model, "full", [range(5, 45)], max_new_tokens=8)
        >>> pressed = kvjax.compress(whole, "keydiff", budget=16)
        >>> [len(positions[0, 0]) for positions in kvjax.held_positions(pressed)][:1]
        [16]
    """
    check_state(state)
    check_on_host("compress", state.position, budget, text)
    if len(state.decoder.decoders) > 1:
        raise ValueError(
            "a state with a draft has a full cache, which has to stay; compress its draft, state.evicting."
        )
    budget, before = checked_budget(budget), state.decoder
    origin = before.origin or ModelOrigin("of this state", None, None, None)
    model = origin.model(before.weights, before.config, before.mesh)
    state_policy = jax.tree.map(
        lambda leaf: leaf.item() if isinstance(leaf, jax.Array) and not leaf.ndim else leaf, before.policy
    )
    chosen = state_policy if policy is None else policy_by_name(policy)
    if chosen.plan.sizing.mode != "budget":
        raise ValueError(f"{name_of(chosen)} takes no budget to compress a cache to; choose a policy that does.")
    target = chosen if policy is None and plan is None else bind_policy(model, chosen, budget, plan)
    if policy is None and target.codec != state_policy.codec:
        raise ValueError(
            f"plan={plan!r} needs another form of the keys under {name_of(target)} than this state stores; read the "
            "text with kvjax.prefill and that plan."
        )
    read = on_host(state.position).astype(np.int64)
    end = planned_ends(state.cache, read)
    limits, capacities = plan_slots(target, budget, read, end - read, before.config, int(read.max()), budget_of)
    lines = lines_of(limits)
    renewed = policy is not None
    if renewed:
        _check_same_tokens(state)
    elif jax.tree.structure(target.sized(lines)) != jax.tree.structure(target):
        name = name_of(target)
        raise ValueError(f"{name} has states whose size is fixed when the text is read; read the text again.")
    read_over = _checked_text(target, text, state, renewed)
    again = None if target.score.requires.replay is None else read_over
    decoder = before.replace(policy=placed_policy(target.sized(lines), before.mesh), policy_and_budget=None)
    matched = read_over if isinstance(target.residual, SlotResidual) else None
    asking = None if matched is None else _queries(before, state.cache.replace(key=None), *matched)
    cache = placed_rows(state.cache.replace(end=jnp.asarray(end, jnp.int32)), before.mesh)
    source, slots = cache.replace(key=None), tuple(jnp.asarray(limit, jnp.int32) for limit in limits)
    if again is not None:
        source = source.replace(layers=_renew_slots(decoder, source, slots), pool=None) if renewed else source
        source = read_again(decoder, unpacked(source, before.mesh), *again)
    layers_of = _renewed_layers if renewed and again is None else held_layers
    pressed = press(decoder, source, slots, capacities, asking, layers_of)
    cache = cache.replace(**stored(pressed, decoder, int(end.max())))
    check_step(decoder, cache)
    settle_step(decoder, cache)
    return State(decoder, cache)


def _checked_text(
    policy: Policy, text: Tokens | None, state: State, renewed: bool
) -> tuple[Int[np.ndarray, "b n"], Int[np.ndarray, " b"]] | None:
    replays, matches = policy.score.requires.replay is not None, isinstance(policy.residual, SlotResidual)
    if text is None:
        if replays and renewed:
            raise ValueError(f"{policy.label} reads the text again; give its token ids, text=[[...], ...].")
        return None
    if not replays and not matches:
        raise ValueError(f"{policy.label} does not read a text again; leave text out.")
    tokens, lengths = rows_of(text)
    if len(tokens) != len(state.position):
        raise ValueError(f"text has {len(tokens)} rows, the state {len(state.position)}; give a text for each row.")
    check_tokens(tokens, lengths, state.config, shortest=1 if matches else 0)
    return tokens, lengths


def _queries(decoder: Decoder, cache: Cache, ids: Int[np.ndarray, "b n"], counts: Int[np.ndarray, " b"]) -> Asking:
    check_length(int((on_host(cache.position) + counts).max()), decoder.policy, decoder.config)
    padded = np.pad(ids, ((0, 0), (0, bucket(ids.shape[1]) - ids.shape[1])))
    tokens, lengths = jnp.asarray(padded, jnp.int32), jnp.asarray(counts, jnp.int32)
    return replayed_queries(decoder, cache, tokens, lengths), jnp.arange(padded.shape[1]) < lengths[:, None]


def _check_same_tokens(state: State) -> None:
    for layer, position in enumerate(state.cache.positions()):
        if (np.sort(position, -1) != np.sort(position[:, :1], -1)).any():
            raise ValueError(
                f"heads of layer {layer} hold different tokens, which a policy other than {name_of(state.policy)} "
                "cannot rank; compress a state that was read under full."
            )


@jax.jit
def _renew_slots(decoder: Bound, cache: Cache, limits: Limits) -> tuple[LayerCache, ...]:
    def renew(decoder: Bound, cache: Cache, limits: Limits) -> tuple[LayerCache, ...]:
        own = tuple(limits[index] for index in decoder.config.storing)
        return scatter_slots(cache.with_storing(_renewed_layers(decoder, cache, own)[0]), decoder.mesh)

    def specs() -> tuple[Any, ...]:
        return tuple(layer.weights.mixer.cache_kind.specs for layer in decoder.layers)

    return run_on_mesh(renew, decoder, cache, limits, argument_specs=OF_HEADS, out_specs=specs)


def _renewed_layers(decoder: Bound, cache: Cache, limits: Limits) -> Ranked:
    # The slots as the policy would have them, had it read the tokens that are there as a prompt, and these tokens.
    reading, slots = cache.newest, gather_slots(cache, decoder.mesh).slots
    layers = zip(decoder.here().storing, slots, limits, strict=True)
    renewed = [
        _renewed(layer, reading, view.replace(limit=limit), decoder.weights.dtype) for layer, view, limit in layers
    ]
    views, tokens = zip(*renewed, strict=True)
    return views, tokens


def _renewed(layer: Layer, reading: TokenBatch, view: Slots, dtype: DTypeLike) -> tuple[Slots, LayerTokens]:
    policy, shape, number = layer.policy, layer.shape, layer.number
    new, order = reading.ahead(shape, number, dtype), text_order(view.position)
    keys, values = (jnp.take_along_axis(x, order[..., None], axis=2) for x in (view.keys(new), view.values(new)))
    at = jnp.take_along_axis(view.position, order, axis=-1)[:, 0]
    text = reading.replace(position=at, token=jnp.zeros_like(at))
    tokens = text.ahead(shape, number, dtype).replace(k=keys, v=values)

    def read(**unknown: Array) -> Slots:
        block = tokens.replace(**unknown)
        slots = empty_slots(policy, shape, number, limit=view.limit, slots=0, dtype=dtype).appended(policy, block)
        requests = policy.score.attention_stats(slots, block)
        if flatten_requests(requests)[0]:
            raise ValueError(
                f"{policy.label} ranks by attention of the text, which a cache does not hold; read the text with "
                "kvjax.prefill."
            )
        return slots.updated(policy, Pending(requests, requests, block))

    def ranks(**unknown: Array) -> Any:
        slots = read(**unknown)
        return slots, policy.scores_and_protection(slots, tokens.replace(**unknown))[0]

    unknown = {name: getattr(tokens, name) for name in UNKNOWN}
    missing = [UNKNOWN[name] for name in sorted(depends_on(ranks, unknown))]
    if missing:
        raise ValueError(
            f"{policy.label} needs {missing[0]} of the text, which a cache does not hold; read the text with "
            "kvjax.prefill."
        )
    return read(**unknown), tokens
