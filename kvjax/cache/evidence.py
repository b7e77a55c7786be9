"""Attention over a layer's slots that answers what the parts of a policy ask of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvjax.asks import Again, Ask, Near, Noise, Probs, Seen, Sums, is_ask, questions
from kvjax.cache.codec import Operands
from kvjax.cache.share import Share
from kvjax.types import SLOTS, LayerConfig, New, PyTree, View, wide
from pallas_kernels import noise as hashed
from pallas_kernels import operands
from pallas_kernels.attention import (
    LowRank,
    Partial,
    join_queries,
    merge,
    query_block,
    share_of_evicted,
    split_queries,
)
from pallas_kernels.attention import tempered as numerators
from pallas_kernels.decode_attention import Decoded, Gumbel, decode_attention
from pallas_kernels.operands import Operand
from pallas_kernels.prefill_scores import Joined, prefill_scores


class Selection(Protocol):
    """Which of the tokens that it sees a query reads."""

    def pick(self, probs: Float[Array, "b h g t c"], new: New) -> Bool[Array, "b h g t c"]:
        """The chosen ones, from the attention of some queries."""
        ...


class Question(NamedTuple):
    """What one pass of a kernel can answer: sums of one softmax, with several rows of weights."""

    tau: Any
    noise: Noise | None


def attend_token(
    config: LayerConfig,
    given: Operands,
    view: View,
    new: New,
    asks: PyTree,
    low_rank: LowRank | None,
    selection: Selection | None,
) -> tuple[Float[Array, "b h g 1 e"], PyTree]:
    """One token per row over its slots, and the answers to what is asked of it.

    Args:
        config: of the layer.
        given: queries, keys and values.
        view: the slots, the new token in one of them.
        new: the token.
        asks: a tree of questions.
        low_rank: the evicted tokens' share, or None.
        selection: which tokens the query reads; None for all.
    """
    alone = selection is None and new.spread.slots == 1
    scores, summed = wanted(asks, new) if alone else ("each" if selection or questions(asks)[0] else None, False)
    found = decode_attention(
        given.q[:, :, :, 0],
        *given.stored,
        view.position,
        new.position[:, 0],
        config.spec,
        places=None if given.places is None else (given.places[0][..., 0], given.places[1]),
        low_rank=_of_token(low_rank) if alone else None,  # which comes after what a selection leaves
        sinks=given.sinks,
        scores=scores,
        **new.kernels._asdict(),
    )
    if new.spread.slots > 1:
        return _shared(found, given, view.position, new, asks, low_rank, selection)
    if selection is None:
        return found.out[:, :, :, None], told(asks, found, view.position, new, summed=summed)
    assert found.scores is not None
    probs = found.scores[:, :, :, None]
    read = _narrowed(selection, probs, given.v, new, found.lse[..., None])
    out = read.out if low_rank is None else merge(read, share_of_evicted(low_rank)).out
    return out, answered(asks, probs, view.position, new)


def wanted(asks: PyTree, new: New) -> tuple[str | Gumbel | None, bool]:
    """What a kernel has to tell of one token per row, and whether it sums what is asked itself.

    Raises:
        ValueError: the question is one about prompts.
    """
    leaves, _ = questions(asks)
    if any(isinstance(ask, Near) for ask in leaves):
        raise ValueError("what falls near a token is known of a prompt that is read whole, not of one more token.")
    kinds = {_question(ask, prompt=False) for ask in leaves}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None:
        return ("each" if leaves else None), False
    return ("sum" if kind == Question(1.0, None) else _gumbel(leaves[0], new)), True


def told(asks: PyTree, found: Decoded, position: Int[Array, "b h c"], new: New, *, summed: bool) -> PyTree:
    """The answers to what is asked of one token per row, from what a kernel was `wanted` to tell."""
    leaves, tree = questions(asks)
    if not leaves:
        return asks
    scores = found.scores
    assert scores is not None
    if summed:
        return tree.unflatten(over_heads(ask, weighed(ask, scores), new) for ask in leaves)
    return answered(asks, scores[:, :, :, None], position, new)


def _shared(
    found: Decoded,
    given: Operands,
    position: Int[Array, "b h c"],
    new: New,
    asks: PyTree,
    low_rank: LowRank | None,
    selection: Selection | None,
) -> tuple[Float[Array, "b h g 1 e"], PyTree]:
    # What the output weights here take in of the attention of heads of which some slots are here, with nothing in the
    # places of other features, and what is asked of these slots.
    # Whatever devices have to tell each other goes at once: logarithms of sums, counts and outputs.
    leaves, tree = questions(asks)
    local = None if found.scores is None else found.scores[:, :, :, None]
    powers: dict[int, Array] = {}
    told, kind = [found.lse], found.lse.dtype
    for i, ask in enumerate(leaves):
        if isinstance(ask, Sums) and not ask.plain:
            # Another softmax, of which each device has a part, too: of powers of the first one's probabilities.
            assert local is not None
            powers[i] = tempered(ask, local, position, new)
            tau = jnp.asarray(ask.tau, kind)
            lse = jnp.where(jnp.isfinite(found.lse), found.lse, 0.0) / (tau[:, :, None] if tau.ndim else tau)
            told.append(jnp.log(powers[i].sum((-2, -1))) + lse)
    sums = len(told)
    if any(isinstance(ask, Probs) for ask in leaves):
        assert local is not None
        told.append(jnp.broadcast_to((local > 0).any(2).sum(-1), found.lse.shape).astype(kind))
    here = jnp.stack(told, axis=-1)
    rows, heads, groups, width = found.out.shape
    if selection is None:
        every, features = new.spread.of_slots(here.reshape(rows, -1), found.out.reshape(rows, -1))
        every = every.reshape(-1, *here.shape)
    else:
        every, features = jax.lax.all_gather(here, SLOTS), None
    totals = jax.nn.logsumexp(every[..., :sums], axis=0)
    shares = _share(here[..., :sums], totals)
    lse, probs = totals[..., 0], None if local is None else local * shares[..., :1, None]
    if features is not None:
        parts = _share(every[..., 0], lse)[..., None]
        parts = jnp.broadcast_to(parts, (*parts.shape[:-1], width)).reshape(len(every), rows, -1)
        out = new.spread.all_features((new.spread.own_features(parts) * features).sum(0))
        out = out.reshape(rows, heads, groups, 1, width)
    else:
        assert probs is not None and selection is not None
        out, lse = _narrowed(selection, probs, given.v, new, lse[..., None])
        out, lse = new.spread.over_slots(out), lse[..., 0]
    if low_rank is not None:  # which all of these devices have
        out = merge(Partial(out, lse[..., None]), share_of_evicted(low_rank)).out

    def answer(i: int, ask: Ask) -> Any:
        assert probs is not None
        if isinstance(ask, Probs):
            return Seen(probs, new.position, every[..., sums].sum(0)[..., :1].astype(jnp.int32))
        assert isinstance(ask, Sums)
        if i not in powers:
            return over_heads(ask, summed(ask, probs), new)
        of_here = normalised(powers[i], powers[i].sum(-1, keepdims=True))
        own = shares[..., 1 + list(powers).index(i), None, None]
        return over_heads(ask, summed(ask, of_here * own), new)

    return out, tree.unflatten(answer(i, ask) for i, ask in enumerate(leaves))


def _share(part: Float[Array, "*n"], whole: Float[Array, "*n"]) -> Float[Array, "*n"]:
    # Of a sum that a part of it has, from the logarithms of both.
    return jnp.where(jnp.isfinite(part), jnp.exp(part - jnp.where(jnp.isfinite(whole), whole, 0.0)), 0.0)


def answered(asks: PyTree, probs: Float[Array, "b h g 1 c"], position: Int[Array, "b h c"], new: New) -> PyTree:
    """What is asked of one token per row, from its attention over whole heads."""
    leaves, tree = questions(asks)

    def answer(ask: Ask) -> Any:
        if isinstance(ask, Probs):
            return Seen(probs, new.position, (probs > 0).any(2).sum(-1))
        assert isinstance(ask, Sums)
        return over_heads(ask, reduced(ask, probs, position, new), new)

    return tree.unflatten(map(answer, leaves))


def _of_token(low_rank: LowRank | None) -> LowRank | None:
    return None if low_rank is None else low_rank._replace(features=low_rank.features[:, :, :, 0])


def attend_block(
    config: LayerConfig,
    given: Operands,
    view: View,
    new: New,
    asks: PyTree,
    low_rank: LowRank | None,
    selection: Selection | None,
) -> tuple[Float[Array, "b h g t e"], PyTree]:
    """A block of a text over its slots, the last of which are its own; see `attend_token`."""
    leaves, tree = questions(asks)
    kinds = [_question(ask, prompt=True) for ask in leaves]
    fused = next((kind for kind in kinds if kind is not None), None)
    together = [i for i, kind in enumerate(kinds) if kind is not None and kind == fused]
    share = Share.of(given, new)
    rows, weights = _stacked([share.weighed(leaves[i]) for i in together], share.new) if together else ([], None)
    zeta = None if fused is None or fused.noise is None else drawn(fused.noise, view.position, new, wide(new.q.dtype))
    found = prefill_scores(
        share.given.q,
        given.k,
        given.v,
        share.new.position,
        view.position,
        config.spec,
        places=share.given.places,
        scores=fused is not None,
        weights=weights,
        noise=zeta,
        tau=1.0 if fused is None else fused.tau,
        own=share.own,
        **new.kernels._asdict(),
    )
    partial = Partial(found.out, found.lse)
    lse = share.whole(found.lse, 3)
    answers: dict[int, Any] = {}
    sums = None if found.scores is None else new.spread.over_queries(found.scores)
    for i, row in zip(together, rows, strict=True):
        assert sums is not None
        answers[i] = over_heads(leaves[i], sums[:, :, row], new)
    rest = [i for i, ask in enumerate(leaves) if isinstance(ask, Sums) and i not in answers]
    if rest:
        more = _by_blocks(config, share.given, view, share.new, [share.weighed(leaves[i]) for i in rest], partial.lse)
        more = map(new.spread.over_queries, more)
        answers |= {i: over_heads(leaves[i], sums, new) for i, sums in zip(rest, more, strict=True)}
    for i, ask in enumerate(leaves):
        if isinstance(ask, Near):
            if view.capacity != new.position.shape[1]:
                raise ValueError("what falls near a token is known of a prompt read whole, not of a part of it.")
            answers[i] = near_sums(config, new, lse, ask.width, ask.most)
        elif isinstance(ask, Probs):
            answers[i] = _newest(config, given, view, new, ask, lse)
    if selection is not None:
        partial = _select_by_blocks(config, share.given, view, share.new, selection, partial)
        lse = share.whole(partial.lse, 3)
    partial = Partial(share.whole(partial.out, 3), lse)
    if low_rank is not None:
        partial = merge(partial, share_of_evicted(low_rank))
    return partial.out, tree.unflatten(answers[i] for i in range(len(leaves)))


def _question(ask: Ask, prompt: bool) -> Question | None:
    # What a kernel can answer, or None: it sums over a group, with one draw for each key.
    if not isinstance(ask, Sums) or ask.group != "sum" or (ask.noise is not None and ask.noise.fresh):
        return None
    if prompt and not isinstance(ask.tau, float):
        return None
    return Question(ask.tau if isinstance(ask.tau, float) else id(ask), ask.noise)


def _gumbel(ask: Ask, new: New) -> Gumbel:
    assert isinstance(ask, Sums)
    tau = jnp.asarray(ask.tau)
    tau = tau[:, 0] if tau.ndim else jnp.full(new.seed.shape, tau)
    kind = (0, "none") if ask.noise is None else (int(new.layer), ask.noise.kind)
    return Gumbel(new.seed, tau, *kind, None if new.head is None else new.head[:, 0])


def weighed(ask: Ask, sums: Float[Array, "b h c"]) -> Float[Array, "b h c"]:
    """A sum over one query, as its weight has it."""
    assert isinstance(ask, Sums)
    return sums if ask.weights is None else sums * ask.weights.astype(sums.dtype)


def over_heads(ask: Ask, found: Float[Array, "b h c"], new: New) -> Float[Array, "b h c"]:
    """A sum over a KV head's queries, as the question wants it over heads."""
    assert isinstance(ask, Sums)
    if ask.over != "layer":
        return found
    mean = new.spread.over_heads(found.mean(1, keepdims=True)) / new.spread.heads
    return jnp.broadcast_to(mean, found.shape)


def drawn(noise: Noise, position: Int[Array, "b h c"], new: New, dtype: DTypeLike) -> Array:
    """zeta of every slot [b h c], or of every query and slot [b h t c] where each query draws anew."""
    query = new.position if noise.fresh else None
    return hashed.KINDS[noise.kind](hashed.uniform_at(new.seed, new.layer, position, query, new.head).astype(dtype))


def tempered(
    ask: Sums, probs: Float[Array, "b h g t c"], position: Int[Array, "b h c"], new: New
) -> Float[Array, "b h g t c"]:
    """Numerators of the softmax that a question is about."""
    tau = jnp.asarray(ask.tau, probs.dtype)
    tau = tau[:, None, None, :, None] if tau.ndim else tau
    if ask.noise is None:
        return numerators(probs, None, tau)
    zeta = drawn(ask.noise, position, new, probs.dtype)
    return numerators(probs, zeta[:, :, None] if ask.noise.fresh else zeta[:, :, None, None], tau)


def normalised(shares: Float[Array, "*n c"], total: Float[Array, "*n 1"]) -> Float[Array, "*n c"]:
    """Shares of a total, none where that is zero."""
    return jnp.where(total > 0, shares / jnp.where(total > 0, total, 1.0), 0.0)


def reduced(
    ask: Sums, probs: Float[Array, "b h g t c"], position: Int[Array, "b h c"], new: New
) -> Float[Array, "b h c"]:
    """The answer of some queries to a question, before it is spread over heads, from their probabilities."""
    if not ask.plain:
        probs = tempered(ask, probs, position, new)
        probs = normalised(probs, probs.sum(-1, keepdims=True))
    return summed(ask, probs)


def summed(ask: Sums, probs: Float[Array, "b h g t c"]) -> Float[Array, "b h c"]:
    """Shares of attention summed over groups and queries."""
    if ask.group == "max":
        probs = probs.max(2)
    elif ask.weights is None:
        return probs.sum((2, 3))
    else:
        probs = probs.sum(2)
    if ask.weights is None:
        return probs.sum(2)
    weights = jnp.broadcast_to(ask.weights, probs.shape[:3])
    return jnp.einsum("bhtc,bht->bhc", probs, weights.astype(probs.dtype))


def _stacked(asks: Sequence[Ask], new: New) -> tuple[list[int], Float[Array, "b #h m t"] | None]:
    # One row of weights for each question; those that count every query once share a row.
    if all(isinstance(ask, Sums) and ask.weights is None for ask in asks):
        return [0] * len(asks), None
    rows: list[int] = []
    stack: list[Array] = []
    everyone = None
    for ask in asks:
        assert isinstance(ask, Sums)
        if ask.weights is None:
            if everyone is None:
                everyone = len(stack)
                stack.append(jnp.ones((new.position.shape[0], 1, new.position.shape[1]), wide(new.q.dtype)))
            rows.append(everyone)
        else:
            rows.append(len(stack))
            stack.append(ask.weights.astype(wide(new.q.dtype)))
    heads = max(row.shape[1] for row in stack)
    shape = (stack[0].shape[0], heads, stack[0].shape[2])
    return rows, jnp.stack([jnp.broadcast_to(row, shape) for row in stack], axis=2)


def whole(operand: Operand | Joined, dtype: DTypeLike) -> Float[Array, "b h c d"]:
    """Keys or values of all slots as numbers."""
    if isinstance(operand, Joined):
        return jnp.concatenate([operands.values(part, dtype) for part in (operand.old, operand.new)], axis=2)
    return operands.values(operand, dtype)


def _probabilities(
    config: LayerConfig,
    given: Operands,
    view: View,
    q: Float[Array, "b h g t d"],
    lse: Float[Array, "b h g t"],
    position: Int[Array, "b t"],
    place: Int[Array, "b h t"] | None,
) -> Float[Array, "b h g t c"]:
    spec = config.spec
    keys = whole(given.k, q.dtype)
    x = spec.capped(jnp.einsum("bhgtd,bhcd->bhgtc", q, keys, preferred_element_type=lse.dtype))
    places = (position[:, None], view.position) if place is None or given.places is None else (place, given.places[1])
    bias = spec.bias(*places)
    x = x if bias is None else x + bias
    seen = spec.mask(position, view.position)[:, :, None]
    return jnp.where(seen, jnp.exp(x - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None]), 0.0)


def _blocks(given: Operands, new: New, lse: Float[Array, "b h g t"]) -> tuple[int, Any]:
    # Queries in blocks: how many each, and (q, lse, position, place) of each.
    size = query_block(new.position.shape[1], new.q.shape[0])
    place = None if given.places is None else split_queries(given.places[0], -1, size)
    parts = (split_queries(given.q, -2, size), split_queries(lse, -1, size), split_queries(new.position, -1, size))
    return size, (*parts, place)


def _by_blocks(
    config: LayerConfig, given: Operands, view: View, new: New, asks: Sequence[Any], lse: Float[Array, "b h g t"]
) -> list[Float[Array, "b h c"]]:
    """Sums that no kernel gives: the logits again, a block of queries at a time."""
    tokens = new.position.shape[1]
    size, blocks = _blocks(given, new, lse)
    every = jnp.ones((new.q.shape[0], 1, tokens), lse.dtype)
    weights = [every if ask.weights is None else ask.weights for ask in asks]
    taus = [jnp.broadcast_to(jnp.asarray(ask.tau, lse.dtype), new.position.shape) for ask in asks]

    def add(sums: list[Array], block: Any) -> tuple[list[Array], None]:
        (q, lse, position, place), weights, taus = block
        part = new.replace(position=position)

        def look() -> list[Array]:
            probs = _probabilities(config, given, view, q, lse, position, place)
            return [
                total + reduced(ask.replace(weights=w, tau=1.0 if ask.plain else tau), probs, view.position, part)
                for total, ask, w, tau in zip(sums, asks, weights, taus, strict=True)
            ]

        # Most of a prompt's queries may count for nothing: only the blocks that do cost anything.
        counts = jnp.stack([(jnp.abs(w) > 0).any() for w in weights]).any()
        return jax.lax.cond(counts, look, lambda: sums), None

    zero = jnp.zeros(view.position.shape, lse.dtype)
    split = [split_queries(w, -1, size) for w in weights], [split_queries(tau, -1, size) for tau in taus]
    return jax.lax.scan(add, [zero] * len(asks), (blocks, *split))[0]


Earlier = Callable[[Float[Array, "b h g a d"], Int[Array, "b a"]], tuple[Array, Int[Array, "b h a"]]]
"""Unrotated queries and their positions -> the queries as attention takes them, and where the model sees them."""


def without_again(asks: PyTree) -> PyTree:
    """The questions about the new tokens' own attention, with nothing in the places of the others."""
    return jax.tree.map(lambda ask: () if isinstance(ask, Again) else ask, asks, is_leaf=is_ask)


def with_again(
    asks: PyTree, answers: PyTree, config: LayerConfig, given: Operands, view: View, earlier: Earlier
) -> PyTree:
    """The answers to `without_again`, and in their places those to the others."""

    def answer(ask: Ask, found: PyTree) -> PyTree:
        return asked_again(config, given, view, ask, earlier) if isinstance(ask, Again) else found

    return jax.tree.map(answer, asks, answers, is_leaf=is_ask)


def asked_again(
    config: LayerConfig, given: Operands, view: View, ask: Again, earlier: Earlier
) -> Float[Array, "b h c"]:
    """What kept queries give to each slot, a few of them at a time.

    Args:
        config: of the layer.
        given: keys as attention takes them.
        view: the slots.
        ask: the queries.
        earlier: makes them what attention takes.
    """
    spec, kind = config.spec, wide(ask.raw_q.dtype)
    _, _, count, groups, width = ask.raw_q.shape
    # Logits of a sixteenth of the size of the keys: of all queries at once they would be larger than the cache.
    size = math.gcd(count, 1 << max(0, (width // (16 * groups)).bit_length() - 1))
    keys = whole(given.k, ask.raw_q.dtype)

    def add(index: Array, sums: Array) -> Array:
        def cut(leaf: Array, axis: int) -> Array:
            return jax.lax.dynamic_slice_in_dim(leaf, index * size, size, axis)

        position, weights = cut(ask.position, 1), cut(ask.weights, 2)

        def look() -> Array:
            q, place = earlier(jnp.moveaxis(cut(ask.raw_q, 2), 3, 2), position)
            # With keys in front, or they are turned and copied in each turn of the loop.
            x = jnp.einsum("bhcd,bhgad->bhcga", keys, q, preferred_element_type=kind)
            x = spec.capped(jnp.moveaxis(x, 2, 4))
            bias = spec.bias(place, view.position if given.places is None else given.places[1])
            x = x if bias is None else x + bias
            # Logits are masked once, and their sums fuse with what they sum, so that little else lies in memory.
            x = jnp.where(spec.mask(position, view.position)[:, :, None], x, jnp.finfo(kind).min)
            highest = jnp.maximum(config.spread.most_of_slots(x.max(-1, keepdims=True)), jnp.finfo(kind).min / 2)
            shares = jnp.exp(x - highest)
            total = config.spread.over_slots(shares.sum(-1, keepdims=True))
            share = normalised(weights.astype(kind)[:, :, None, :, None], total)
            return sums + jnp.einsum("bhgac,bhga->bhc", shares, share[..., 0])

        return jax.lax.cond((weights > 0).any(), look, lambda: sums)

    return jax.lax.fori_loop(0, count // size, add, jnp.zeros(view.position.shape, kind))


def _newest(
    config: LayerConfig, given: Operands, view: View, new: New, ask: Probs, lse: Float[Array, "b h g t"]
) -> Seen:
    count = min(ask.newest, new.position.shape[1])
    index = new.valid.sum(1, dtype=jnp.int32)[:, None] - count + jnp.arange(count)
    at = jnp.maximum(index, 0)
    position = jnp.where(index >= 0, jnp.take_along_axis(new.position, at, 1), -1)
    q = jnp.take_along_axis(given.q, at[:, None, None, :, None], 3)
    place = None if given.places is None else jnp.take_along_axis(given.places[0], at[:, None], 2)
    probs = _probabilities(config, given, view, q, jnp.take_along_axis(lse, at[:, None, None], 3), position, place)
    return Seen(probs, position, (probs > 0).any(2).sum(-1))


def _select_by_blocks(
    config: LayerConfig, given: Operands, view: View, new: New, selection: Selection, partial: Partial
) -> Partial:
    def look(_: None, block: Any) -> tuple[None, Partial]:
        q, lse, position, place = block
        probs = _probabilities(config, given, view, q, lse, position, place)
        return None, _narrowed(selection, probs, given.v, new.replace(position=position), lse)

    found = jax.lax.scan(look, None, _blocks(given, new, partial.lse)[1])[1]
    return Partial(join_queries(found.out, -2), join_queries(found.lse, -1))


def _narrowed(
    selection: Selection,
    probs: Float[Array, "b h g t c"],
    v: Operand | Joined,
    new: New,
    lse: Float[Array, "b h g t"],
) -> Partial:
    picked = new.spread.own_slots(selection.pick(new.spread.all_slots(probs, -1), new), -1)
    if new.config is not None and new.config.local:
        picked |= new.config.bounds(new.end)[:, None, None, None, None]
    kept = jnp.where(picked, probs, 0.0)
    mass = new.spread.over_slots(kept.sum(-1, keepdims=True))
    safe = jnp.where(mass > 0, mass, 1.0)
    out = jnp.einsum("bhgtc,bhcd->bhgtd", kept / safe, whole(v, kept.dtype))
    return Partial(out, lse + jnp.log(safe)[..., 0])


def near_sums(
    config: LayerConfig,
    new: New,
    lse: Float[Array, "b h g t"],
    width: Int[Array, "b t"] | None = None,
    most: int = 1,
) -> Float[Array, "b h t"]:
    """What each token of a whole prompt gets from the queries that come soon after it, in blocks along the diagonal.

    Args:
        config: of the layer.
        new: the prompt.
        lse: of its queries.
        width: how many of the newest tokens count for each query, itself included; None for itself alone.
        most: what no width exceeds.
    """
    (b, h, _, t, _), kind, spec = new.q.shape, lse.dtype, config.spec
    if width is None:
        x = spec.capped(jnp.einsum("bhgtd,bhtd->bhgt", new.q, new.k, preferred_element_type=kind))
        return jnp.where(new.position[:, None, None] >= 0, jnp.exp(x - lse), 0.0).sum(2)
    size = query_block(t, b)
    span = min(t, -(-most // size) * size + size)

    def add(sums: Array, queries: Any) -> tuple[Array, None]:
        q, lse, at, width, first = queries
        start = jnp.maximum(first + size - span, 0)
        keys = jax.lax.dynamic_slice_in_dim(new.k, start, span, axis=2)
        where = jax.lax.dynamic_slice_in_dim(new.position, start, span, axis=1)
        x = spec.capped(jnp.einsum("bhgtd,bhsd->bhgts", q, keys, preferred_element_type=kind))
        bias = spec.bias(at[:, None], where[:, None])
        x = x if bias is None else x + bias
        seen = spec.mask(at, where[:, None])
        seen &= (at[:, :, None] - where[:, None] < width[..., None])[:, None]
        added = jnp.where(seen[:, :, None], jnp.exp(x - lse[..., None]), 0.0).sum((2, 3))
        added += jax.lax.dynamic_slice_in_dim(sums, start, span, axis=2)
        return jax.lax.dynamic_update_slice_in_dim(sums, added, start, axis=2), None

    parts = ((new.q, -2), (lse, -1), (new.position, -1), (width, -1))
    blocks = [split_queries(x, axis, size) for x, axis in parts]
    return jax.lax.scan(add, jnp.zeros((b, h, t), kind), (*blocks, jnp.arange(0, t, size)))[0]
