"""Full caches in some heads, and the first and newest tokens in the others."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.methods.register import combine
from kvjax.methods.window import Recency
from kvjax.policies import Policy, Protection, Sizing, Uniform
from kvjax.types import LayerTokens, View, at_least, setting


class EndsOrAll(Uniform, interface=True):
    """Slots for the whole text in some heads, and for its ends in the others: a subclass says which.

    Args:
        sinks: first tokens that the other heads keep.
        recent: newest tokens that the other heads keep, the one being read included.
    """

    sinks: int = setting(4, at_least(0, "a number of tokens"))
    recent: int = setting(1024, at_least(1, "a number of tokens"))

    @property
    def sizing(self) -> Sizing:
        """Slots computed from the prompt, for a text of the planned length."""
        return Sizing(mode="profiled", per_head=True, fixed_length=True)

    def slots_of(self, ends: Bool[Array, "b #h"], view: View, new: LayerTokens) -> Int[Array, "b h"]:
        """Return slots for the ends, and for special tokens of the prompt, in the heads of a mask, else for all."""
        end_slots, length, special = self.sinks + self.recent, new.end[:, None], view.slots.protection
        if special is not None:
            end_slots += (view.live & special & (view.position >= self.sinks)).sum(-1)
        ends = jnp.broadcast_to(ends, view.limit.shape)
        return jnp.where(ends, jnp.minimum(end_slots, length), length).astype(jnp.int32)


def ends_policy(plan: EndsOrAll, *, sinks: int, recent: int, special: tuple[int, ...] = (), **common: Any) -> Policy:
    """Return the policy of a plan: the oldest token is evicted first, generated special tokens are not protected."""
    protection = Protection(sinks, recent, special, generated=False)
    return combine(Recency(), plan=plan, protection=protection, **common)
