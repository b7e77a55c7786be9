"""Which slot of each head a new token takes, and what leaves it: in one layer, or in all layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.cache import slots
from kvjax.policies.policy import Policy
from kvjax.types import KV, Evicted, LayerConfig, New, Parts, PyTree, View, restored, wide
from pallas_kernels.decode_step import Hashed
from pallas_kernels.evict import evict
from pallas_kernels.evict import exchange as exchange_slots
from pallas_kernels.hamming import Hashing, hamming
from pallas_kernels.ranking import Protection

Exchanged = tuple[Int[Array, "b h"], Any, Int[Array, "b h c"], dict[str, PyTree]]
"""The position that left each head, what its slot held or None, and positions and buffers with the new token."""


class Ranks(NamedTuple):
    """What decides which slot a new token takes."""

    scores: Array | None
    """None where positions say as much."""
    bounds: Protection
    keep: Bool[Array, "b h c"] | None
    hashing: Hashing | None
    """Of the new token, where how far its code is from those that slots remember says as much as scores."""


def ranked(policy: Policy, view: View, new: New) -> Ranks:
    """What the policy says of a layer's slots as a token per row arrives."""
    scores, guard = slots.scores(policy, view, new)
    simple = guard.last is None and not slots.windowed(new)
    bounds = Protection(guard.sinks, guard.recent, slots.room(policy, view.limit, new))
    hashing = policy.hashing(new) if simple else None
    return Ranks(None if policy.slides and simple else scores, bounds, guard.keep, hashing)


def hashed_codes(hashing: Hashing | None, held: Parts) -> Hashed | None:
    """The new token's hashing with the codes that slots remember, as the kernel of a step takes them."""
    return None if hashing is None else Hashed(hashing, held.score)


def exchange(policy: Policy, view: View, new: New, held: tuple[Any, ...], *, pairs: bool) -> Exchanged:
    """Lay a token per row into the slot that ranks lowest of each head.

    Args:
        policy: of the policy.
        view: the slots.
        new: the token.
        held: positions, its own [b], buffers, and what of the token goes into them.
        pairs: whether what a slot held is told.
    """
    scores, bounds, keep, hashing = ranked(policy, view, new)
    asked: dict[str, Any] = dict(protection=bounds, keep=keep, **new.kernels._asdict())
    if hashing is None or policy.shrinks:
        return evict(scores, *held, shrinks=policy.shrinks, pairs=pairs, **asked)[1:]
    slot = hamming(hashing.of_queries(), view.slots.score, view.position, new.position[:, 0], **asked)
    return exchange_slots(slot, *held, pairs=pairs)[1:]


def victims_of(policy: Policy, views: Sequence[View], new: Sequence[New]) -> tuple[slots.Victim, ...]:
    """The slots that a token per row takes in several layers at once, where devices share the slots of heads.

    At once, for each time that devices tell each other something takes as long.
    """
    claims = []
    for view, tokens in zip(views, new, strict=True):
        scores, bounds, keep, _ = ranked(policy, view, tokens)
        claims.append(slots.claim(scores, view.position, tokens, bounds, keep, policy.shrinks))
    return slots.victims_of_all(jnp.stack(claims), [view.capacity for view in views])


def exchange_among(view: View, new: New, victim: slots.Victim, held: tuple[Any, ...], *, pairs: bool) -> Exchanged:
    """`exchange` with known victims where several devices have a head's slots.

    One of them has the slot that is taken, and tells the others what they need.
    """
    _, _, taken, position, buffers = exchange_slots(victim.slot, *held)
    here = victim.slot < view.capacity

    def told(leaf: Array) -> Array:
        return new.spread.over_slots(jnp.where(here.reshape(*here.shape, *(1,) * (leaf.ndim - 2)), leaf, 0))

    kv = jax.tree.map(told, taken["kv"]) if pairs else taken["kv"]
    remembered = taken["slots"].replace(codec=jax.tree.map(told, taken["slots"].codec))
    left = jnp.where(new.valid[:, :1], victim.position, -1)
    return left, {"kv": kv, "slots": remembered}, position, buffers


def evicted_pairs(
    policy: Policy, config: LayerConfig, state: Parts, new: New, kv: KV | None, left: Int[Array, "b h"]
) -> Evicted:
    """What has left for a token per row, as a residual takes it: not rounded to 16 bits on the way.

    Args:
        policy: of the policy.
        config: of the layer.
        state: what the parts remember of its heads.
        new: the token.
        kv: what its slot held, leaves [b h ...]; None where nobody asked, and nothing is told.
        left: the position of that, -1 where the slot was empty.
    """
    if kv is None:
        return slots.nothing_evicted(new)
    stored = jax.tree.map(lambda leaf: leaf[:, :, None], kv)
    pair = restored(config.rope, stored, left[..., None], state.codec, wide(new.k.dtype))
    remembered = slots.remembered_positions(left, new)
    return Evicted(pair.k, pair.v, remembered[..., None], new.layer, new.kernels)
