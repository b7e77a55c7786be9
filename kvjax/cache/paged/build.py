"""Paged caches of a prompt: tokens are selected head by head, then packed into pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from kvjax.cache import slots
from kvjax.cache.paged.storage import Paged, write_pages
from kvjax.policies.policy import Policy
from kvjax.types import Heads, New, View

PAGE_BLOCK = 64
"""Maximal number of pages whose keys and values are read together."""


class Selected(struct.PyTreeNode):
    """Prompt of a layer, and the selection of its tokens that stay."""

    view: View
    """Slots of the whole prompt, empty where tokens were evicted; `limit` holds the slots that each head requests."""
    order: Int[Array, "b h c"]
    """Slots, from the most to the least important one."""
    count: Int[Array, "b h"]
    """Number of slots that stay."""


def select(policy: Policy, view: View, new: New) -> tuple[Selected, Bool[Array, "b h c"]]:
    """Select the tokens of a prompt that stay, head by head, and a mask of those that are evicted; pages come later."""
    order, count = slots.chosen(policy, view, new)
    leaving = view.live & (jnp.argsort(order, axis=-1) >= count[..., None])
    if policy.plan.sizing.fixed_length:
        # A head gets one token per step: do not allocate slots that it cannot fill.
        view = view.replace(limit=jnp.minimum(view.limit, count + (new.end - new.read)[:, None]))
    view = policy.codec.settle(view.replace(position=jnp.where(leaving, -1, view.position)), new)
    return Selected(view, order, count), leaving


def pack(
    selected: tuple[Selected, ...],
    owner: Int[Array, " P"],
    first: Int[Array, " P"],
    start: Int[Array, " layers_and_1"],
    *,
    page_size: int,
    most: int,
    spare: int = 0,
    devices: tuple[int, int] = (1, 1),
) -> Paged:
    """Pack selected tokens into a pool of pages, whose table is from `table`, or one device's part of it."""

    def room(leaf: Array) -> Array:
        return jnp.zeros((len(owner), page_size, *leaf.shape[3:]), leaf.dtype)

    example = selected[0].view
    pool = Paged(
        kv=jax.tree.map(room, example.kv),
        position=room(example.position) - 1,
        slots=jax.tree.map(room, example.slots),
        owner=owner,
        first=first,
        start=start,
        layers=tuple(Heads(layer.view.limit, layer.view.state) for layer in selected),
        most=most,
        spare=spare,
        devices=devices,
    )
    for index, layer in enumerate(selected):

        def move(pool: Paged, at: Array, valid: Array, layer: Selected = layer) -> Paged:
            tokens = layer.order.shape[-1]
            order, count = layer.order.reshape(-1, tokens), layer.count.reshape(-1)
            owner = jax.lax.dynamic_slice_in_dim(pool.owner, at, len(valid))
            slot = jax.lax.dynamic_slice_in_dim(pool.first, at, len(valid))[:, None] + jnp.arange(page_size)
            real = slot < count[owner][:, None]
            source = order[owner[:, None], jnp.minimum(slot, tokens - 1)] + (owner * tokens)[:, None]

            def fetch(leaf: Array) -> Array:
                return leaf.reshape(-1, *leaf.shape[3:])[source]

            view = layer.view
            moved = jax.tree.map(fetch, (view.kv, view.position, view.slots))
            moved = moved[0], jnp.where(real, moved[1], -1), moved[2]
            held = pool.kv, pool.position, pool.slots
            kv, position, slots = jax.tree.map(lambda room, value: write_pages(room, value, at, valid), held, moved)
            return pool.replace(kv=kv, position=position, slots=slots)

        pool = pool.over_pages(index, move, pool, PAGE_BLOCK)
    return pool
