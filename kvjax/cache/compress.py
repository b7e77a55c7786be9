"""Selection of the slots to keep when the buffers of a layer are compressed."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool

from kvjax.cache import slots
from kvjax.policies.policy import Policy
from kvjax.policies.residual import Queries, SlotResidual
from kvjax.types import New, View


def best_slots(
    policy: Policy, view: View, new: New, capacity: int, coming: int = 0
) -> tuple[Array, Array, Bool[Array, "b h c"]]:
    """Choose the slots to keep in buffers of `capacity` slots per head, up to the limit of each head.

    Rows without new tokens keep their slots in place.

    Args:
        coming: number of new tokens that have no slot yet, and need one.

    Returns:
        The best slots of whole heads [b h capacity], a mask of those that are kept, and a mask of this device's slots
        that are evicted.
    """
    position = new.spread.all_slots(view.position)
    rows, heads, held = position.shape
    best, count = slots.chosen(policy, view, new, coming)
    idle = ~new.valid.any(1)[:, None, None]
    best = jnp.where(idle, jnp.arange(held, dtype=jnp.int32), best)
    count = jnp.where(idle[..., 0], held, count)
    missing = max(0, capacity - held)
    if missing:
        # Pad with repeats of the last slot, which `kept` excludes.
        best = jnp.concatenate([best, jnp.broadcast_to(best[..., -1:], (rows, heads, missing))], axis=-1)
    best = best[..., :capacity]
    place = jnp.arange(capacity)
    kept = (place < count[..., None]) & (place < capacity - missing)
    kept &= slots.gather(position, best) >= 0
    staying = jnp.zeros(position.shape, bool)
    staying = staying.at[jnp.arange(rows)[:, None, None], jnp.arange(heads)[None, :, None], best].max(kept)
    return best, kept, new.spread.own_slots((position >= 0) & ~staying)


def rewritten(policy: Policy, before: View, after: View, queries: Queries, new: New) -> View:
    """Return the slots that stay, as a residual of slots changes them for what has left."""
    residual = policy.residual
    found = residual.rewrite(before, after, queries, new) if isinstance(residual, SlotResidual) else None
    if found is None:
        return after
    changed = policy.codec.stored(found.values), found.bias
    values, states = slots.where_read(new, changed, (after.kv.v, after.slots.residual))
    return after.replace(kv=after.kv.replace(v=values), slots=after.slots.replace(residual=states))
