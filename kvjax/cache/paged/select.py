"""Tokens of a prompt that stay under a plan with slots for each head, before they are packed into pages."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.cache import ranks
from kvjax.cache.layer import LayerCache
from kvjax.policies.policy import Policy
from kvjax.types import OF_HEADS, LayerTokens, View


class Selected(LayerCache):
    """Prompt of a layer, and the selection of its tokens that stay."""

    view: View
    """Slots of the whole prompt, empty where tokens were evicted; `limit` holds the slots that each head requests."""
    order: Int[Array, "b h c"]
    """Slots, from the most to the least important one."""
    count: Int[Array, "b h"]
    """Number of slots that stay."""


def select(policy: Policy, view: View, new: LayerTokens) -> tuple[Selected, Bool[Array, "b h c"]]:
    """Select the tokens of a prompt that stay, head by head, and a mask of those that are evicted; pages come later."""
    order, count = ranks.slots_to_keep(policy, view, new)
    leaving = view.live & (jnp.argsort(order, axis=-1) >= count[..., None])
    if policy.plan.sizing.fixed_length:
        # A head gets one token per step: do not allocate slots that it cannot fill.
        view = view.replace(limit=jnp.minimum(view.limit, count + (new.end - new.read)[:, None]))
    view = policy.codec.settle(view.replace(position=jnp.where(leaving, -1, view.position)), new)
    return Selected(view, order, count), leaving


Selected.specs = Selected(OF_HEADS, OF_HEADS, OF_HEADS)
