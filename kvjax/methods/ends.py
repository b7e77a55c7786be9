"""Full caches in some heads, and the first and newest tokens in the others."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from kvjax.policies.allocation import Plan, Sizing, Uniform
from kvjax.types import New, View, check, setting


@struct.dataclass
class EndsOrAll(Uniform, interface=True):
    """Slots for the whole text in some heads, and for its ends in the others: a subclass says which.

    Args:
        initial: first tokens that the other heads keep.
        newest: newest tokens that the other heads keep, the one being read included.
    """

    method: ClassVar[str] = ""
    """Name of the policy, in messages."""

    initial: int = setting(4)
    newest: int = setting(1024)

    def __post_init__(self) -> None:
        check(self.initial >= 0, "sinks", self.initial, "a number of tokens from 0")
        check(self.newest >= 1, "recent", self.newest, "a number of tokens from 1")

    @property
    def sizing(self) -> Sizing:
        """Slots computed from the prompt, for a text of the planned length."""
        return Sizing(mode="profiled", per_head=True, fixed_length=True)

    def spread_by(self, other: Plan) -> Plan:
        """Refuse another plan: there is no budget to distribute."""
        raise ValueError(
            f"{self.method} decides itself how many slots each head gets, so budget and plan={type(other).__name__} "
            "mean nothing to it; leave both out and change its settings."
        )

    def slots_of(self, ends: Bool[Array, "b #h"], view: View, new: New) -> Int[Array, "b h"]:
        """Return slots for the ends, and for special tokens of the prompt, in the heads of a mask, else for all."""
        few, every, special = self.initial + self.newest, new.end[:, None], view.slots.protection
        if special is not None:
            few += (view.live & special & (view.position >= self.initial)).sum(-1)
        ends = jnp.broadcast_to(ends, view.limit.shape)
        return jnp.where(ends, jnp.minimum(few, every), every).astype(jnp.int32)
