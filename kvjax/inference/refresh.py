"""A draft's slots chosen anew from the full cache, by the attention of the tokens that it has just verified."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.cache.evict import where_read
from kvjax.cache.pending import Pending, sum_over_layers
from kvjax.cache.ranks import best_slots, gather
from kvjax.cache.slots import Slots
from kvjax.cache.stats import reduced
from kvjax.inference.cache import Bound, Cache
from kvjax.inference.compress import UNKNOWN
from kvjax.inference.sharding import gather_slots, run_on_mesh, scatter_slots
from kvjax.inference.verify import Queries, truncate
from kvjax.models.decoder import Layer
from kvjax.policies.policy import Policy
from kvjax.policies.stats import AttentionSum, Damage, Peak, flatten_requests, over_heads
from kvjax.types import OF_HEADS, OF_ROWS, LayerTokens, TokenBatch, View, restored
from kvjax.utils.dependence import depends_on
from pallas_kernels.attention import attend

SIZE = 16
"""Slots of the small caches with which a policy is checked."""


def refresh_draft(draft: Bound, cache: Cache, full: Cache, queries: Queries, counts: Int[Array, " b"]) -> Cache:
    r"""Return a draft's cache with the slots of the full cache that its policy ranks highest; call it under `jit`.

    The policy ranks the text as a prompt of which it has seen the attention of the last tokens alone, those that have
    just been verified: sums of attention start from 0. With the queries q of the n tokens of a row that stay, a slot
    gets

    .. math:: s_j = \sum_{t \le n} w_t \sum_g \mathrm{softmax}_j(q_{gt} \cdot k_j)

    over all keys of the full cache, with the weights w that the policy requests. Sinks, the recent window and the
    limits of heads are the policy's. Vegas (arXiv 2602.07223) and SparseSpec (2512.01278) choose keys so, too.

    Args:
        draft: decoder that drafts, which `check_refresh` accepts.
        cache: the draft's cache.
        full: the full cache after the tokens that stay.
        queries: those of all verified tokens, the ones that stay first.
        counts: tokens of each row that stay; rows without any keep their slots.
    """

    def refresh_on_device(draft: Bound, cache: Cache, full: Cache, queries: Queries, counts: Array) -> Cache:
        draft, tokens = draft.here(), _newest(cache, full, queries, counts)
        before: Any = gather_slots(cache, draft.mesh).layers
        layers: list[Any] = list(gather_slots(full, draft.mesh).layers)
        rankings = dict[int, tuple[Slots, Pending]]()  # a layer without slots has the same cache under all policies
        for index, (layer, q) in enumerate(zip(draft.layers, queries, strict=True)):
            if q is not None:
                contents = _contents(layer, layers[index], tokens, q, draft.weights.dtype)
                rankings[index] = _ranking(layer.policy, before[index], layers[index], *contents)
        sums = sum_over_layers([pending for _, pending in rankings.values()])
        for (index, (slots, _)), pending in zip(rankings.items(), sums, strict=True):
            layers[index] = _best(draft.layers[index].policy, before[index], slots, pending)
        layers = [where_read(tokens, after, old) for after, old in zip(layers, before, strict=True)]
        position = jnp.where(counts > 0, full.position, cache.position)
        return cache.replace(layers=scatter_slots(tuple(layers), draft.mesh), position=position)

    return run_on_mesh(
        refresh_on_device,
        draft,
        cache,
        full,
        queries,
        counts,
        argument_specs=(full.specs, OF_HEADS, OF_ROWS),
        out_specs=lambda: cache.specs,
    )


def truncate_draft(cache: Cache, length: Int[Array, " b"]) -> Cache:
    """Return a draft's cache with empty slots in place of the tokens at `length` and later ones."""
    layers = tuple(layer.open() for layer in cache.layers)
    return truncate(cache.replace(layers=layers), jnp.minimum(cache.position, length))


def _newest(cache: Cache, full: Cache, queries: Queries, counts: Int[Array, " b"]) -> TokenBatch:
    # The tokens that stay, without their ids, as the end of a prompt.
    place = jnp.arange(next(q.shape[3] for q in queries if q is not None))
    position = jnp.where(place < counts[:, None], (full.position - counts)[:, None] + place, -1)
    reading = cache.reading(jnp.zeros_like(position), position, full.position)
    return reading.replace(prompt_length=full.position, given=True)


def _contents(
    layer: Layer, slots: Slots, tokens: TokenBatch, q: Float[Array, "b h g n d"], dtype: DTypeLike
) -> tuple[LayerTokens, LayerTokens]:
    """Return all tokens of the text in the order of slots, and the newest ones with their queries.

    The slots are those of a full cache, in which the order is the same in all heads.
    """
    position = slots.position[:, 0]
    text = tokens.replace(position=position, token=jnp.zeros_like(position)).ahead(layer.shape, layer.number, dtype)
    new = tokens.ahead(layer.shape, layer.number, dtype).replace(q=q)
    return text.replace(k=slots.keys(text), v=slots.values(text)), new


def _ranking(
    policy: Policy, of_draft: Slots, of_full: Slots, text: LayerTokens, new: LayerTokens
) -> tuple[Slots, Pending]:
    """Return all slots of a layer in the form of the draft's policy, and the statistics of attention that rank them."""
    state = of_draft.state.replace(score=policy.score.init_head(text), codec=of_full.state.codec)
    slots = of_full.replace(limit=of_draft.limit, state=state, slots=policy.slots(text, state))
    requests, spec = policy.score.attention_stats(slots, new), new.config.spec
    leaves, tree = flatten_requests(requests)
    mask, bias = spec.mask(new.position, slots.position), spec.bias(new.position[:, None], slots.position)
    _, probs = attend(new.q, text.k, text.v, mask, spec, bias)
    stats = [over_heads(request, reduced(request, probs, text.v, slots.position, new), new) for request in leaves]
    return slots, Pending(requests, tree.unflatten(stats), new)


def _best(policy: Policy, of_draft: Slots, slots: Slots, pending: Pending) -> Slots:
    # The slots that rank highest, in the draft's buffers and codec.
    ranked, new = slots.updated(policy, pending), pending.new
    best, valid, _ = best_slots(policy, ranked, new, of_draft.capacity)
    kv, position, states = jax.tree.map(lambda leaf: gather(leaf, best), (slots.kv, slots.position, ranked.slots))
    codec = of_draft.state.codec
    pairs = restored(new.config.rope, kv, position, slots.state.codec, new.k.dtype)
    return of_draft.replace(
        state=of_draft.state.replace(score=ranked.state.score),
        kv=policy.codec.encode(new.replace(k=pairs.k, v=pairs.v), codec),
        position=jnp.where(valid, position, -1),
        slots=states,
    )


def check_refresh(draft: Bound, full: Bound) -> None:
    """Refuse a draft whose slots the attention of a few verified tokens cannot rank.

    Raises:
        ValueError: the policy ranks by something else, or has a plan, a codec or a residual that depends on more; or
            the full cache is in host memory.
    """
    if full.policy.plan.sizing.host_memory:
        raise ValueError(
            "refresh=True ranks the slots of the full cache, which memory='host' moves; leave one of them out."
        )
    policy, sizing = draft.policy, draft.policy.plan.sizing
    needs = policy.score.requires
    layers = draft.replace(policy=policy.sized((SIZE,) * draft.config.layers), mesh=None).layers
    obstacles = (
        (policy.selection is not None, "holds all tokens"),
        (sizing.mode != "budget", "decides itself how many tokens a head holds"),
        (sizing.per_head, "has a plan that gives each head another number of slots"),
        (policy.residual is not None, "has a residual, which remembers the tokens that were evicted"),
        (needs.replay is not None, "reads the text a second time"),
        (needs.host_memory, "keeps its scores in host memory"),
    )
    reason = next((text for applies, text in obstacles if applies), None) or _missing(layers, draft.weights.dtype)
    if reason is None and policy.codec.positions == "cache":
        reason = "has keys with positions in its cache"
    if reason is not None:
        raise ValueError(
            f"refresh=True ranks the draft's slots by the attention of verified tokens, but {policy.label} {reason}; "
            "leave refresh out, or draft with a policy such as h2o, tova, snapkv or keyformer."
        )


def _missing(layers: list[Layer], dtype: DTypeLike) -> str | None:
    """Return what a policy needs to rank slots that a verification does not give; None if it gives all."""
    limits = [jnp.full((1, layer.shape.kv_heads), SIZE, jnp.int32) for layer in layers]
    caches: list[Any] = [layer.init_cache(limit, SIZE, dtype) for layer, limit in zip(layers, limits, strict=True)]
    layer, slots = next(pair for pair in zip(layers, caches, strict=True) if isinstance(pair[1], View))
    policy, tokens = layer.policy, TokenBatch.of_text(jnp.zeros((1, 2), jnp.int32), jnp.full(1, 2))
    q = tokens.ahead(layer.shape, layer.number, dtype).q
    text, new = _contents(layer, slots, tokens, q, dtype)
    requests = flatten_requests(jax.eval_shape(policy.score.attention_stats, slots, new))[0]
    if not requests:
        return "ranks without attention"
    if not all(isinstance(request, AttentionSum | Damage | Peak) for request in requests):
        return "ranks by attention of other queries, too"

    def ranks(**contents: tuple[Array, Array]) -> Any:
        of_text = {name: pair[0] for name, pair in contents.items() if name in UNKNOWN}
        of_new = {name: pair[1] for name, pair in contents.items() if name != "q"}
        view, pending = _ranking(policy, slots, slots, text.replace(**of_text), new.replace(**of_new))
        after = view.updated(policy, pending)
        return after.slots, after.state.score, policy.scores_and_protection(after, pending.new)[0]

    unknown = UNKNOWN | {"k": "keys of single tokens", "v": "values of single tokens"}
    contents = {name: (getattr(text, name), getattr(new, name)) for name in unknown}
    missing = [unknown[name] for name in sorted(depends_on(ranks, contents))]
    return f"needs {missing[0]} of the text" if missing else None
