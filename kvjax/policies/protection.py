"""Protection: tokens that are never evicted, and tokens that are evicted last."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax.policies.base import Part
from kvjax.types import LayerTokens, Limit, PyTree, View, number, setting
from kvjax.utils.fields import at_least

MOST = 2**20
"""Bound on the budgets that messages advise."""


class Quota(NamedTuple):
    """Number of tokens that a head may keep for their score alone."""

    limit: Int[Array, "b h"]
    among_all: bool
    """True if protected tokens that score among the highest count, too."""


class Protected(NamedTuple):
    """Protected tokens and slots of some heads.

    If protected tokens outnumber the slots, sinks are kept, and the oldest other token is evicted.
    """

    sinks: Int[Array, "b h"] | Int[Array, ""]
    """Number of first positions that are never evicted; a scalar if all heads have the same."""
    recent: Int[Array, "b h"] | Int[Array, ""]
    """Number of newest tokens that are never evicted, the one being read included; a scalar if all heads agree."""
    keep: Bool[Array, "b h c"] | None = None
    """Slots that are never evicted while there is another one."""
    last: Bool[Array, "b h c"] | None = None
    """Slots that are evicted only if no other slot can be."""
    quota: Quota | None = None
    """Bound on the tokens that heads keep for their score alone, those in `last` apart; None for no bound.

    It may depend on `view.limit` and `view.state`, not on slots. Only a plan with slots for each head keeps it.
    """


def _is_window(recent: int | float) -> bool:
    return 0 <= recent <= 1 if isinstance(recent, float) else recent >= 0


class Protection(Part, interface=True):
    """Protect the first tokens, the newest tokens and special tokens; a layer with a window, only inside the window.

    A budget must hold sinks and the recent window. Special tokens have no bound: if they outnumber the other slots, the
    oldest of them is evicted. This holds for a text that is read as a prompt, in turns or token by token.

    Args:
        sinks: first tokens of the text that are never evicted.
        recent: newest tokens that are never evicted, the one being read included: slots, or a fraction of the budget.
        special: token ids that are evicted only if no other token can be.
        one_in: the first tokens get at least one in this many of a head's slots, and the newest as many, each no fewer
            than one; None for no such bound.
        generated: False to protect special tokens of prompts and turns alone, for plans without slots for others.

    Example:
        >>> kvjax.Protection(sinks=4, recent=0.5).check_budget(6)
        Traceback (most recent call last):
            ...
        ValueError: sinks + recent = 4 + 3 slots do not fit in a budget of 6 slots per head; use a budget of at least...
    """

    sinks: int = number(0, at_least(0, "a whole number"))
    recent: int | float = number(0, Limit(_is_window, "a number of slots from 0, or a fraction from 0.0 to 1.0"))
    special: tuple[int, ...] = setting(())
    one_in: float | None = number(None, at_least(2, "a number"))
    generated: bool = setting(True)

    @property
    def omega(self) -> float | None:
        """Half of `one_in`, LightKV's name for the slots of a head over those of its first and newest tokens."""
        return None if self.one_in is None else self.one_in / 2

    def init_slot(self, new: LayerTokens, state: PyTree) -> Bool[Array, "b h t"] | None:
        """Return a mask of the special tokens; None if no token ids are special."""
        if not self.special:
            return None
        counts = self.generated or new.given
        special = jnp.isin(new.token, jnp.asarray(self.special)) & counts
        return jnp.broadcast_to(special[:, None], new.k.shape[:3])

    def sink_slots(self, limit: Int[Array, "*b"]) -> Int[Array, "*b"] | Int[Array, ""]:
        """Return the number of protected first tokens in heads of `limit` slots; a scalar if all heads agree."""
        return self._at_least(jnp.asarray(self.sinks, jnp.int32), limit)

    def recent_slots(self, limit: Int[Array, "*b"]) -> Int[Array, "*b"] | Int[Array, ""]:
        """Return the recent window in slots, for heads of `limit` slots; a scalar if all heads agree."""
        return self._at_least(recent_slots(self.recent, limit), limit)

    def _at_least(self, slots: Int[Array, "*#b"], limit: Int[Array, "*b"]) -> Int[Array, "*#b"]:
        return slots if self.one_in is None else jnp.maximum(slots, one_slot_in(self.one_in, limit))

    def guard(self, view: View, new: LayerTokens) -> Protected:
        """Return the protected tokens and slots of some heads."""
        return Protected(self.sink_slots(view.limit), self.recent_slots(view.limit), view.slots.protection)

    def check_tokens(self, vocabulary: int) -> None:
        """Refuse special tokens outside a model's vocabulary."""
        for token in self.special:
            if not 0 <= token < vocabulary:
                raise ValueError(
                    f"special={self.special!r} names token {token} of a vocabulary of {vocabulary} tokens."
                )

    def check_budget(self, budget: int, smallest: Callable[[int], int] = int) -> None:
        """Refuse a budget that does not hold sinks, the recent window and the token being read.

        Args:
            budget: slots per head.
            smallest: function from a budget to the slots of the head with the fewest slots.

        Raises:
            ValueError: if they do not fit; the recent window includes the token being read.
        """

        def protected(budget: int) -> tuple[int, int, int, bool]:
            slots = smallest(budget)
            sinks, recent = map(int, _protected(self, np.int32(slots)))
            return slots, sinks, recent, sinks + max(recent, 1) <= slots

        slots, sinks, recent, fits = protected(budget)
        if fits:
            return
        read = "" if recent else " and the token that is being read"
        of_plan = "" if slots == budget else f", which gives a layer {slots}"
        smallest_budget = bisect.bisect_left(range(MOST), True, lo=budget, key=lambda budget: protected(budget)[3])
        larger = f"use a budget of at least {smallest_budget} or " if smallest_budget < MOST else ""
        raise ValueError(
            f"sinks + recent = {sinks} + {recent} slots{read} do not fit in a budget of {budget} slots per head"
            f"{of_plan}; {larger}protect fewer tokens."
        )


@jax.jit
def _protected(protection: Protection, limit: Int[Array, ""]) -> tuple[Int[Array, ""], Int[Array, ""]]:
    return protection.sink_slots(limit), protection.recent_slots(limit)


def one_slot_in(ratio: float, limit: Int[Array, "*b"]) -> Int[Array, "*b"]:
    """Return one slot for each `ratio` slots of heads, and one at least."""
    return jnp.maximum(1, jnp.floor(limit / ratio + 1e-6)).astype(jnp.int32)


def recent_slots(recent: int | float, limit: Int[Array, "*b"]) -> Int[Array, "*b"] | Int[Array, ""]:
    """Return a number of slots: `recent` itself, or that fraction of the slots that heads may use."""
    if jnp.issubdtype(jnp.result_type(recent), jnp.floating):  # a fraction, or its tracer
        return jnp.floor(recent * limit + 1e-6).astype(jnp.int32)
    return jnp.asarray(recent, jnp.int32)
