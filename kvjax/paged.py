"""Heads with caches of their own sizes: one pool of pages for all layers, rows and heads, and a decode step on it.

A page holds some slots of one head; the pages of a head, and those of a layer, lie side by side. Every page is one
flash-decoding split, and what belongs to one head is merged by the page's owner, so nothing is gathered or padded. A
layer's pages are visited in blocks, from its first to its last, both known only at run time: one program serves
every prompt whose pool has the same number of pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache as caches_
from kvjax.attention import head_slopes
from kvjax.models.config import ModelConfig
from kvjax.types import KV, LayerCache, NewTokens, PyTree, wide
from pallas_kernels.paged_attention import Paged, paged_attention

if TYPE_CHECKING:
    from kvjax.plan import Plan
    from kvjax.policies.base import Policy

PAGE_BLOCK = 64
"""Pages whose keys and values are read together, at most."""

VIEW_BLOCK = 256
"""Pages whose positions and scores are looked at together, at most: they are small."""


class Pool(struct.PyTreeNode):
    """The caches of a whole model: P pages of s slots each."""

    kv: KV
    """k, v [P s d]"""
    position: Int[Array, "P s"]
    """Original position of the token in each slot; -1 = empty."""
    keep: Bool[Array, "P s"] | None
    """Tokens protected for what they are; None where the policy protects no token ids."""
    stats: PyTree
    """What the policy remembers of each slot: arrays [P s ...]."""
    owner: Int[Array, " P"]
    """Which (row, KV head) a page belongs to: row * heads + head."""
    first: Int[Array, " P"]
    """Which of its head's slots a page begins with."""
    start: Int[Array, " layers_and_1"]
    """The first page of each layer, and the end of the last."""
    state: tuple[PyTree, ...]
    """For each layer what the policy remembers of it: arrays [b h ...]."""
    limit: tuple[Int[Array, "b h"], ...]
    """For each layer the slots that each head may use."""

    @property
    def page_size(self) -> int:
        """Slots in a page."""
        return self.position.shape[1]


class Selected(struct.PyTreeNode):
    """A layer's prompt and what of it is going to stay."""

    cache: LayerCache
    """All of the prompt; `limit` is what each head calls for."""
    order: Int[Array, "b h c"]
    """Slots from the most to the least important one."""
    count: Int[Array, "b h"]
    """How many of them stay."""


def select(policy: Policy, cache: LayerCache, new: NewTokens, plan: Plan | None) -> Selected:
    """Decide what stays of a prompt, head by head, before there is a place for it."""
    if plan is not None:
        budget = plan.split(caches_.rank(policy, cache, new), cache.limit, (new.read + new.horizon)[:, None])
        cache = cache.replace(limit=budget)
    ranks, position = caches_.rank(policy, cache, new), cache.position
    worth = (position >= 0) & (ranks > -jnp.inf)
    slots = jnp.broadcast_to(jnp.arange(position.shape[-1], dtype=jnp.int32), position.shape)
    _, _, order = jax.lax.sort((jnp.where(worth, -ranks, jnp.inf), -position, slots), num_keys=2)
    count = worth.sum(-1, dtype=jnp.int32)
    most = policy.competing(cache, new)
    if most is not None:
        competing = (worth & (ranks < caches_.last_resort(ranks.dtype))).sum(-1, dtype=jnp.int32)
        count += jnp.minimum(most, competing) - competing
    return Selected(cache, order, jnp.minimum(count, cache.limit))


def page_slots(tokens: int) -> int:
    """Slots in a page for texts of up to so many tokens: small enough that a head's last page wastes little."""
    return 16 if tokens <= 256 else 32 if tokens <= 512 else 64


def round_pages(pages: int) -> int:
    """Pages in the pool: the next multiple of a sixteenth of the next lower power of two, at most 6.25% more."""
    unit = max(1, 1 << (max(1, pages).bit_length() - 5)) if pages >= 16 else 1
    return -(-pages // unit) * unit


def build(selected: Sequence[Selected], page_size: int) -> Pool:
    """The pool that holds what was selected: sizes are read on the host, then one program moves the tokens.

    Args:
        selected: for each layer.
        page_size: slots in a page.
    """
    limits = np.stack(jax.device_get([layer.cache.limit for layer in selected]))
    pages = -(-limits.reshape(len(limits), -1) // page_size)
    start = np.concatenate([[0], np.cumsum(pages.sum(1))])
    total = round_pages(int(start[-1]))
    owner, first = np.zeros(total, np.int32), np.zeros(total, np.int32)
    flat = pages.reshape(-1)
    owner[: start[-1]] = np.repeat(np.arange(flat.size) % pages.shape[1], flat)
    before = np.repeat(np.cumsum(flat) - flat, flat)
    first[: start[-1]] = (np.arange(start[-1]) - before) * page_size
    table = [jnp.asarray(x, jnp.int32) for x in (owner, first, start)]
    return _pack(tuple(selected), *table, page_size=page_size)


def _pack_layers(selected: tuple[Selected, ...], owner, first, start, *, page_size: int) -> Pool:
    pages = len(owner)

    def room(leaf: Array, fill: Any = 0) -> Array:
        return jnp.full((pages, page_size, *leaf.shape[3:]), fill, leaf.dtype)

    cache = selected[0].cache
    pool = Pool(
        kv=jax.tree.map(room, cache.kv),
        position=room(cache.position, -1),
        keep=None if cache.keep is None else room(cache.keep),
        stats=jax.tree.map(room, cache.stats),
        owner=owner,
        first=first,
        start=start,
        state=tuple(layer.cache.state for layer in selected),
        limit=tuple(layer.cache.limit for layer in selected),
    )
    for index, layer in enumerate(selected):
        tokens = layer.order.shape[-1]
        order, count = layer.order.reshape(-1, tokens), layer.count.reshape(-1)

        def move(pool, at, valid, cache=layer.cache, order=order, count=count, tokens=tokens):
            owner = _cut(pool.owner, at, len(valid))
            slot = _cut(pool.first, at, len(valid))[:, None] + jnp.arange(page_size)
            real = slot < count[owner][:, None]
            source = order[owner[:, None], jnp.minimum(slot, tokens - 1)] + (owner * tokens)[:, None]

            def fetch(leaf, room, fill=None):
                found = leaf.reshape(-1, *leaf.shape[3:])[source]
                found = found if fill is None else jnp.where(real, found, fill)
                return _write(room, found, at, valid)

            return pool.replace(
                kv=jax.tree.map(fetch, cache.kv, pool.kv),
                position=fetch(cache.position, pool.position, -1),
                keep=None if cache.keep is None else fetch(cache.keep, pool.keep, False),
                stats=jax.tree.map(fetch, cache.stats, pool.stats),
            )

        pool = _over_pages(pool, index, move, pool, PAGE_BLOCK)
    return pool


_pack = jax.jit(_pack_layers, static_argnames="page_size")


def scratch(pool: Pool, groups: int) -> Float[Array, "P g s"]:
    """Where a step keeps the logits of one layer after another."""
    return jnp.zeros((pool.position.shape[0], groups, pool.page_size), wide(pool.kv.k.dtype))


def read_token(
    config: ModelConfig, policy: Policy, pool: Pool, layer: int, new: NewTokens, logits: Float[Array, "P g s"]
) -> tuple[Pool, Float[Array, "b h g 1 d"], Float[Array, "P g s"]]:
    """One decode step of one layer: the new token takes a slot of each head, attends to all, is observed.

    Args:
        config: the model's shape.
        policy: which slot the token takes.
        pool: all caches.
        layer: which of them is read and written.
        new: one token per row; its keys are stored as they are.
        logits: from `scratch` or from another layer.

    Returns:
        The pool, what the token reads, and the logits, to be given to the next layer.
    """
    slot = victim(policy, pool, layer, new)
    pool = put(pool, slot, caches_.entries(policy, new, pool.state[layer], KV(new.k, new.v)))
    found = paged_attention(
        new.q[:, :, :, 0],
        pool.kv.k,
        pool.kv.v,
        pool.position,
        pool.owner,
        pool.start[layer : layer + 2],
        new.position[:, 0],
        window=config.sliding_window,
        slopes=head_slopes(config),
        logits=logits,
    )
    if policy.needs_probs:
        pool = observe(policy, pool, layer, new, found)
    return pool, found.out[:, :, :, None], found.logits


def victim(policy: Policy, pool: Pool, layer: int, new: NewTokens) -> Int[Array, "b h"]:
    """The slot, counted over the whole pool, that the next token takes in each head: the rule of `cache.victim`.

    Where the policy limits the tokens that compete, they do so only when there are too many of them; otherwise an
    empty slot is taken, or the oldest token kept as a last resort.
    """
    rows, heads = new.k.shape[:2]
    limit = pool.limit[layer].reshape(-1)
    most = policy.competing(_layer_shapes(pool, layer), new)
    size, far = pool.page_size, jnp.iinfo(jnp.int32).max

    def look(carry, at, valid):
        view, seen, owner = _view(pool, layer, new, at, len(valid))
        ranks, position = caches_.rank(policy, view, seen)[:, 0], view.position[:, 0]
        slot = jnp.arange(size, dtype=jnp.int32)
        usable = valid[:, None] & (_cut(pool.first, at, len(valid))[:, None] + slot < limit[owner][:, None])
        flat = (at + jnp.arange(len(valid), dtype=jnp.int32))[:, None] * size + slot
        members = _members(owner, valid, rows * heads)
        if most is None:
            return (_better(carry[0], _lowest(usable, ranks, position, flat, members)),)
        competes = usable & (position >= 0) & (ranks < caches_.last_resort(ranks.dtype))
        count = jnp.where(members, competes.sum(-1, dtype=jnp.int32), 0).sum(1, dtype=jnp.int32)
        strong = _better(carry[1], _lowest(competes, ranks, position, flat, members))
        rest = _better(carry[0], _lowest(usable & ~competes, ranks, position, flat, members))
        return rest, strong, carry[2] + count

    ranks = jax.eval_shape(lambda: caches_.rank(policy, *_view(pool, layer, new, 0, 1)[:2])).dtype
    nobody = (
        jnp.full(rows * heads, jnp.inf, ranks),
        jnp.full(rows * heads, far, jnp.int32),
        jnp.full(rows * heads, far, jnp.int32),
    )
    if most is None:
        ((_, _, chosen),) = _over_pages(pool, layer, look, (nobody,))
    else:
        nothing = jnp.zeros(rows * heads, jnp.int32)
        rest, strong, count = _over_pages(pool, layer, look, (nobody, nobody, nothing))
        chosen = jnp.where(count > most.reshape(-1), strong[2], rest[2])
    return jnp.where(new.valid[:, :1], chosen.reshape(rows, heads), far)


def put(pool: Pool, slot: Int[Array, "b h"], added: dict[str, PyTree]) -> Pool:
    """The pool with one new entry per head written over a slot; a slot out of bounds writes nothing."""
    flat = slot.reshape(-1)

    def write(leaf: Array, value: Array) -> Array:
        value = value.reshape(flat.shape[0], *leaf.shape[2:]).astype(leaf.dtype)
        slots = leaf.reshape(-1, *leaf.shape[2:])
        return slots.at[flat].set(value, unique_indices=True, mode="drop").reshape(leaf.shape)

    old = {name: getattr(pool, name) for name in added}
    return pool.replace(**jax.tree.map(write, old, added))


def observe(policy: Policy, pool: Pool, layer: int, new: NewTokens, found: Paged) -> Pool:
    """The pool after the policy has seen how the new token attended, a block of pages at a time."""
    lse = found.lse.reshape(-1, found.lse.shape[-1])
    lse = jnp.where(lse > -jnp.inf, lse, jnp.inf)  # who sees nothing gives nothing

    def probabilities(at, count, owner):
        return jnp.exp(_cut(found.logits, at, count) - lse[owner][..., None])[:, None, :, None]

    if policy.normalises:

        def add(carry, at, valid):
            view, seen, owner = _view(pool, layer, new, at, len(valid))
            shares = policy.share(view, probabilities(at, len(valid), owner), seen)[:, 0, :, 0].sum(-1)
            shares = jnp.where(valid[:, None], shares, 0.0)  # other layers' pages hold other layers' logits
            return carry + jnp.einsum("op,pg->og", _members(owner, valid, len(lse)).astype(shares.dtype), shares)

        sums = _over_pages(pool, layer, add, jnp.zeros_like(lse))

    def look(stats, at, valid):
        view, seen, owner = _view(pool.replace(stats=stats), layer, new, at, len(valid))
        probs = probabilities(at, len(valid), owner)
        if policy.normalises:
            shares = policy.share(view, probs, seen)
            whole = sums[owner][:, None, :, None, None]
            after = policy.gather(view, jnp.where(whole > 0, shares / jnp.where(whole > 0, whole, 1.0), 0.0), seen)
        else:
            after = policy.observe(view, probs, seen)
        return jax.tree.map(lambda room, leaf: _write(room, leaf[:, 0], at, valid), stats, after.stats)

    return pool.replace(stats=_over_pages(pool, layer, look, pool.stats))


def positions(pool: Pool, position: np.ndarray | None = None) -> list[np.ndarray]:
    """For each layer the position in each slot [b, h, c], -1 where there is none, on the host.

    Args:
        pool: says which page belongs to whom.
        position: [P s], another moment of the same pool's positions; None for its own.
    """
    held = np.asarray(pool.position if position is None else position)
    owner, first, start = np.asarray(pool.owner), np.asarray(pool.first), np.asarray(pool.start)
    layers = []
    for layer, limit in enumerate(pool.limit):
        rows, heads = limit.shape
        slots = -(-int(np.asarray(limit).max()) // pool.page_size) * pool.page_size
        dense = np.full((rows * heads, slots), -1, np.int32)
        for page in range(start[layer], start[layer + 1]):
            dense[owner[page], first[page] : first[page] + pool.page_size] = held[page]
        layers.append(dense.reshape(rows, heads, slots))
    return layers


def _over_pages(
    pool: Pool, layer: int, look: Callable[[Any, Array, Array], Any], carry: Any, block: int = VIEW_BLOCK
) -> Any:
    """Fold `look(carry, at, valid)` over a layer's pages: blocks start at page `at`, `valid` masks the new pages."""
    pages = pool.owner.shape[0]
    size = min(block, pages)
    start, end = pool.start[layer], pool.start[layer + 1]

    def look_at(i, carry):
        wanted = start + i * size
        at = jnp.minimum(wanted, pages - size)  # the last block of the pool looks back
        page = at + jnp.arange(size)
        return look(carry, at, (page >= wanted) & (page < end))

    return jax.lax.fori_loop(0, (end - start + size - 1) // size, look_at, carry)


def _cut(leaf: Array, at: Array | int, count: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(leaf, at, count)


def _write(room: Array, value: Array, at: Array, valid: Bool[Array, " p"]) -> Array:
    mask = valid.reshape(-1, *(1,) * (room.ndim - 1))
    return jax.lax.dynamic_update_slice_in_dim(room, jnp.where(mask, value, _cut(room, at, len(valid))), at, 0)


def _view(pool: Pool, layer: int, new: NewTokens, at, count: int) -> tuple[LayerCache, NewTokens, Int[Array, " p"]]:
    """A block of pages as a policy sees it: a layer with a page in each row and one head."""
    heads = new.k.shape[1]
    owner = _cut(pool.owner, at, count)
    row = owner // heads

    def of_head(leaf: Array) -> Array:
        return leaf.reshape(-1, *leaf.shape[2:])[owner][:, None]

    def of_page(leaf: Array) -> Array:
        return _cut(leaf, at, count)[:, None]

    view = LayerCache(
        kv=jax.tree.map(of_page, pool.kv),
        position=of_page(pool.position),
        keep=None if pool.keep is None else of_page(pool.keep),
        order=None,
        stats=jax.tree.map(of_page, pool.stats),
        state=jax.tree.map(of_head, pool.state[layer]),
        limit=of_head(pool.limit[layer]),
    )
    seen = NewTokens(
        q=of_head(new.q),
        k=of_head(new.k),
        v=of_head(new.v),
        position=new.position[row],
        token=new.token[row],
        prompt_length=new.prompt_length[row],
        read=new.read[row],
        horizon=new.horizon[row],
        seed=new.seed[row],
        layer=new.layer,
        head=(owner % heads)[:, None],
    )
    return view, seen, owner


def _layer_shapes(pool: Pool, layer: int) -> LayerCache:
    # What is known of whole heads; their slots lie in pages.
    state, limit = pool.state[layer], pool.limit[layer]
    nothing: Any = None
    return LayerCache(nothing, nothing, None, None, None, state, limit)


def _members(owner: Int[Array, " p"], valid: Bool[Array, " p"], owners: int) -> Bool[Array, "o p"]:
    return (owner == jnp.arange(owners)[:, None]) & valid


Choice = tuple[Float[Array, " o"], Int[Array, " o"], Int[Array, " o"]]


def _lowest(allowed: Bool[Array, "p s"], ranks: Array, position: Array, flat: Array, members: Array) -> Choice:
    """Rank, position and slot of each owner's lowest rank, of equals the oldest."""
    far = jnp.iinfo(jnp.int32).max
    low = jnp.where(allowed, ranks, jnp.inf)
    best = low.min(1)
    tied = allowed & (low == best[:, None])
    age = jnp.where(tied, position, far)
    oldest = age.min(1)
    slot = jnp.where(tied & (age == oldest[:, None]), flat, far).min(1)
    by_owner = jnp.where(members, best, jnp.inf)
    lowest = by_owner.min(1)
    tied = members & (by_owner == lowest[:, None])
    ages = jnp.where(tied, oldest, far)
    first = ages.min(1)
    return lowest, first, jnp.where(tied & (ages == first[:, None]), slot, far).min(1)


def _better(a: Choice, b: Choice) -> Choice:
    second = (b[0] < a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
    return tuple(jnp.where(second, y, x) for x, y in zip(a, b, strict=True))  # type: ignore[return-value]


__all__ = ["Pool", "Selected", "build", "page_slots", "positions", "read_token", "select"]
