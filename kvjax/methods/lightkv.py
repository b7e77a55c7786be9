"""LightKV: a lambda-shaped mask, and caches that shrink once a text is long; its score is in `scores/lightkv.py`."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int

from kvjax.policies.allocation import Arithmetic, Plan
from kvjax.policies.protection import Protection
from kvjax.types import check, number, setting, written


@struct.dataclass
class LambdaMask(Protection):
    r"""Sinks and streaming tokens that are a share of a head's slots, as in LightKV.

    .. math:: C_{sink} = C_{streaming} = \frac{C_l}{2 \omega} \quad \text{(eq. 5)}

    Args:
        omega: C_l over the width of the whole mask, at least 1.
        sinks: the least number of sinks.
        recent: the least recent window.
    """

    omega: float = number(4.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(not written(self.omega) or self.omega >= 1, "omega", self.omega, "a number from 1")

    def sink_slots(self, limit: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """C_sink, or `sinks` if that is more."""
        return jnp.maximum(mask_width(limit, self.omega), self.sinks)

    def recent_slots(self, limit: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """C_streaming, or `recent` if that is more."""
        return jnp.maximum(mask_width(limit, self.omega), super().recent_slots(limit))


@struct.dataclass
class AfterLimit(Plan):
    r"""LightKV's sizes of caches: nothing leaves before a context limit, then C_l slots, or fewer, are left.

    A prompt that is longer than the limit, whose length is known before it is read, is compressed at once, and its
    buffers have no more slots than are left. No layer ever holds more than the limit: one that is below C_1 is refused.

    .. math:: C_k = C_l - C_{sink} - C_{streaming} \quad \text{(eq. 6)}

    Args:
        plan: gives C_l (equations 1 and 2).
        context_limit: length up to which nothing is evicted, in tokens, at least C_1; the buffers hold as many if a
            prompt is no longer than that. None for C_l.
        mask: sinks and streaming tokens, where no more middle tokens than sinks are kept (the example of section 4);
            None for all of C_l.
    """

    plan: Plan = Arithmetic()
    context_limit: int | None = setting(None)
    mask: LambdaMask | None = None

    def __post_init__(self) -> None:
        tokens = self.context_limit is None or (isinstance(self.context_limit, int) and self.context_limit >= 1)
        check(tokens, "context_limit", self.context_limit, "a number of tokens from 1, or None")

    @property
    def middle(self) -> str:
        """`mask` for as many middle tokens as there are sinks, `rest` for all that C_l leaves."""
        return "rest" if self.mask is None else "mask"

    @property
    def shrinks(self) -> bool:  # type: ignore[override]
        """Whether a cache gets smaller once the context limit is passed."""
        return self.context_limit is not None

    def shares(self, budget: int, layers: int) -> np.ndarray:
        """Those of the other plan."""
        return self.plan.shares(budget, layers)

    def spread_by(self, other: Plan) -> Plan:
        """C_l as the other plan has it."""
        return super().spread_by(other) if other.per_head else dataclasses.replace(self, plan=other)

    def _left(self, limit: Int[Array, "*b"]) -> Int[Array, "*b"]:
        # What is left of a text beyond the context limit.
        if self.mask is None:
            return limit
        middle = mask_width(limit, self.mask.omega)
        return jnp.minimum(limit, self.mask.sink_slots(limit) + self.mask.recent_slots(limit) + middle)

    def room(self, limit: Int[Array, "b h"], length: Int[Array, " b"]) -> Int[Array, "b h"]:
        """C_l, or the mask and C_sink middle tokens, beyond the context limit; everything up to it."""
        left = self._left(limit)
        if self.context_limit is None:
            return left
        return jnp.where(length[:, None] <= self.context_limit, self.context_limit, left)

    def buffer_slots(self, limit: int, shortest: int) -> int:
        """What is left beyond the context limit, or the limit if a prompt is no longer than that."""
        if self.context_limit is not None and self.context_limit < limit:
            raise ValueError(
                f"context_limit={self.context_limit} is below the C_1 = {limit} slots of the first layer, and no layer "
                "may hold more than the limit; use a higher limit, a smaller budget or a smaller ratio."
            )
        if self.context_limit is not None and shortest <= self.context_limit:
            return self.context_limit
        return int(self._left(jnp.asarray(limit)))


def mask_width(limit: Int[Array, "*b"], omega: float) -> Int[Array, "*b"]:
    """LightKV's equation 5, at least one slot."""
    return jnp.maximum(1, jnp.floor(limit / (2 * omega) + 1e-6)).astype(jnp.int32)
