"""Plans: how many slots each layer and head may use, and when, whatever the score that fills them."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, NamedTuple

import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from kvjax.policies.base import Part
from kvjax.types import Heads, New, PyTree, View, number


class Quota(NamedTuple):
    """How many tokens a head may hold for their score alone."""

    most: Int[Array, "b h"]
    among_all: bool
    """Whether protected tokens take such a place, too, where they score among the highest."""


@struct.dataclass(kw_only=True)
class Plan(Part, interface=True):
    """Gives every layer its slots; all layers together always get exactly `layers * budget`.

    Args:
        extra_slots: slots per head beyond the budget that the user names, for comparisons at equal memory.

    Example:
        >>> kvjax.methods.PLANS["arithmetic"](ratio=3.0).budgets(64, layers=4).tolist()
        [96, 75, 53, 32]
    """

    per_head: ClassVar[bool] = False
    """Whether `settle` gives each head of a layer slots of its own."""
    decides: ClassVar[bool] = False
    """Whether it finds out how many slots each head needs: there is no budget then."""
    bounded: ClassVar[bool] = True
    """Whether tokens may leave at all; if not, the budget is the whole text."""
    ends: ClassVar[bool] = False
    """Whether the slots suffice for the planned text only."""
    shrinks: ClassVar[bool] = False
    """Whether several tokens may have to leave at one step, as where `room` falls."""

    extra_slots: int = number(0)

    def spread_by(self, other: Plan) -> Plan:
        """This plan with its budget spread as another one has it."""
        return dataclasses.replace(other, extra_slots=self.extra_slots)

    def settle(
        self, answers: PyTree, view: View, ranks: Float[Array, "b h c"] | None, new: New
    ) -> tuple[Int[Array, "b h"], PyTree]:
        """Slots of each head, and what the plan remembers, once a prompt has been read and ranked.

        Args:
            answers: to what it `asks`.
            view: all slots of the prompt.
            ranks: of these, from `kvjax.cache.slots.rank`, for plans that give each head its own; the lowest finite
                number is an empty slot.
            new: the prompt.
        """
        return view.limit, view.state.plan

    def room(self, limit: Int[Array, "b h"], length: Int[Array, " b"]) -> Int[Array, "b h"]:
        """Slots that heads with a budget of `limit` may use in a text of so many tokens, all of its prompt included."""
        return limit

    def buffer_slots(self, limit: int, shortest: int) -> int:
        """Slots that the buffers of heads have to hold.

        Args:
            limit: their budget.
            shortest: tokens of the shortest prompt.

        Raises:
            ValueError: the budget does not fit the plan's settings.
        """
        return limit

    def competing(self, heads: Heads, new: New) -> Quota | None:
        """How many tokens a head may hold for their score alone; None for no such bound.

        Tokens that a protection has leave last stay without such a place.
        """
        return None

    @abc.abstractmethod
    def shares(self, budget: int, layers: int) -> np.ndarray:
        """Slots per layer before rounding, float [layers], for an average of `budget` slots per layer and KV head."""

    def budgets(self, budget: int, layers: int) -> np.ndarray:
        """Slots per KV head of each layer, int [layers], that sum exactly to `layers * budget`.

        Raises:
            ValueError: a layer would get no slot.
        """
        shares = self.shares(budget, layers)
        whole = np.floor(shares + 1e-9).astype(np.int64)
        # Largest remainders, so that nothing is lost to rounding; of equal ones the lower layer gets the slot.
        order = np.argsort(-(shares - whole), kind="stable")
        whole[order[: int(layers * budget - whole.sum())]] += 1
        if whole.min() < 1:
            raise ValueError(
                f"{self!r} gives layer {int(whole.argmin())} no slot at a budget of {budget} per layer; "
                "use a larger budget or a flatter plan."
            )
        return whole


@struct.dataclass
class Uniform(Plan):
    r"""Every layer gets the same number of slots.

    .. math:: C_l = C

    From: H2O and most others.

    When: first. No other plan is ahead of it over `h2o` by more than the error (SmolLM2 on WikiText-2).
    """

    def shares(self, budget: int, layers: int) -> np.ndarray:
        return np.full(layers, float(budget))
