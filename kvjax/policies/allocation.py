"""Plans: the number of slots that each layer and head may use at each length of a text, under any score."""

from __future__ import annotations

import abc
import dataclasses
import warnings
from typing import Any, Literal

import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.policies.base import Part
from kvjax.types import LayerConfig, LayerTokens, PyTree, View, check, number
from kvjax.utils.fields import check_fields


@dataclasses.dataclass(frozen=True)
class Sizing:
    """Properties of the numbers of slots that a plan gives to heads.

    Args:
        mode: `budget` if it distributes the user's budget, `unbounded` if no token is evicted, `profiled` if it
            computes the slots of each head from the prompt. Only `budget` takes a budget.
        per_head: True if `head_budgets` gives the heads of a layer different numbers of slots.
        all_layers: True if `head_budgets` is called once, with the heads of all layers side by side. No token of a
            prompt is evicted before all layers have read it.
        fixed_length: True if the slots suffice for the planned text only.
        may_shrink: True if one step may have to evict several tokens, for example because `slots_at` decreases.
        spare_slots: slots of a buffer beyond the budget, if `slots_at` increases again after a decrease.
        host_memory: True to keep the pairs of prompts in host memory, of layers without a window; only if no token is
            evicted.
    """

    mode: Literal["budget", "unbounded", "profiled"] = "budget"
    per_head: bool = False
    all_layers: bool = False
    fixed_length: bool = False
    may_shrink: bool = False
    spare_slots: int = 0
    host_memory: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        modes = ("budget", "unbounded", "profiled")
        check(self.mode in modes, "mode", self.mode, f"one of {', '.join(modes)}")
        if self.host_memory:
            check(self.mode == "unbounded", "mode", self.mode, "unbounded, as host_memory needs it")

    def in_host_memory(self, layer: LayerConfig) -> bool:
        """Return whether a layer keeps its prompts in host memory; windows are small enough for the device."""
        return self.host_memory and layer.window is None


_RENAMED = {"shares": "layer_budgets", "settle": "head_budgets", "room": "slots_at"}
_REPLACED = {
    "per_head": "override the property sizing, which returns kvjax.Sizing(per_head=True)",
    "decides": "override the property sizing, which returns kvjax.Sizing(mode='profiled')",
    "bounded": "override the property sizing, which returns kvjax.Sizing(mode='unbounded')",
    "ends": "override the property sizing, which returns kvjax.Sizing(fixed_length=True)",
    "shrinks": "override the property sizing, which returns kvjax.Sizing(may_shrink=True)",
    "buffer_slots": "buffers hold slots_at of the shortest prompt, and sizing.spare_slots more than the budget",
    "budgets": "override layer_budgets, which kvjax rounds",
    "competing": "the guard of a protection returns it as Protected.quota",
}


FIXED = Sizing()


class Plan(Part, interface=True, kw_only=True):
    """Number of slots of each layer and head; the layers together get exactly `layers * budget`.

    Args:
        extra_slots: slots per head beyond the user's budget, for comparisons at equal memory.

    Example:
        >>> kvjax.methods.PLANS["arithmetic"](ratio=3.0).layer_budgets(64, layers=3).tolist()
        [96.0, 64.0, 32.0]
    """

    extra_slots: int = number(0)

    def __init_subclass__(cls, *, interface: bool = False, **options: Any) -> None:
        super().__init_subclass__(interface=interface, **options)
        for name in _REPLACED.keys() & vars(cls).keys():
            raise TypeError(f"{cls.__name__}.{name} is no longer a member of a plan; {_REPLACED[name]}.")
        for old in _RENAMED.keys() & vars(cls).keys():
            warnings.warn(f"{cls.__name__}.{old} is now {_RENAMED[old]}.", DeprecationWarning, 2)
            setattr(cls, _RENAMED[old], vars(cls)[old])
            delattr(cls, old)

    @property
    def sizing(self) -> Sizing:
        """Properties of the plan's numbers of slots."""
        return FIXED

    def spread_by(self, allocation: Plan) -> Plan:
        """Return a plan that distributes the budget over layers as another one does."""
        return dataclasses.replace(allocation, extra_slots=self.extra_slots)

    @abc.abstractmethod
    def layer_budgets(self, budget: int, layers: int) -> np.ndarray:
        """Return slots per layer before rounding, float [layers], for an average of `budget` slots per KV head."""

    def head_budgets(
        self, stats: PyTree, view: View, ranks: Float[Array, "b h c"] | None, new: LayerTokens
    ) -> tuple[Int[Array, "b h"], PyTree]:
        """Return the slots of each head, and the plan's state, once a prompt has been read and ranked.

        Args:
            stats: attention statistics, in the structure of `attention_stats`; () under `Sizing.all_layers`.
            view: all slots of the prompt; under `Sizing.all_layers` a `Heads` with the limits alone.
            ranks: ranks of these slots, from `kvjax.cache.ranks.rank`; empty slots have the lowest finite number. None
                unless the plan spreads a budget over heads.
            new: the prompt.
        """
        return view.limit, view.state.plan

    def slots_at(self, limit: Int[Array, "b h"], length: Int[Array, " b"]) -> Int[Array, "b h"]:
        """Return the slots that heads may use in a text of `length` tokens, including the whole prompt.

        `kvjax.prefill` sizes buffers for the shortest prompt, before it compiles anything. Slots that increase with the
        length reach at most the budget plus `sizing.spare_slots`.

        Args:
            limit: budget of each head.
            length: tokens of the text.

        Raises:
            ValueError: the budget does not fit the plan's settings.
        """
        return limit


def layer_slots(plan: Plan, budget: int, layers: int) -> np.ndarray:
    """Return the slots per KV head of each layer, int [layers], from 1, which sum exactly to `layers * budget`."""
    shares = np.asarray(plan.layer_budgets(budget, layers))
    sums = shares.shape == (layers,) and np.issubdtype(shares.dtype, np.number)
    if not (sums and abs(shares.sum() - layers * budget) < 1):  # false for NaN, too
        raise ValueError(
            f"{type(plan).__name__}.layer_budgets gives {shares.tolist()}, not slots for each of {layers} layers that "
            f"sum to {layers * budget}."
        )
    slots = np.floor(shares + 1e-9).astype(np.int64)
    # Largest remainders, so that nothing is lost to rounding; of equal ones the lower layer gets the slot.
    order = np.argsort(-(shares - slots), kind="stable")
    slots[order[: int(layers * budget - slots.sum())]] += 1
    if slots.min() < 1:
        raise ValueError(
            f"{plan!r} gives layer {int(slots.argmin())} no slot at a budget of {budget} per layer; "
            "use a larger budget or a flatter plan."
        )
    return slots


class Uniform(Plan):
    r"""Every layer gets the same number of slots.

    .. math:: C_l = C

    From: H2O and most others.

    When: by default. With `h2o` no other plan is better by more than the standard error (SmolLM2 on WikiText-2).
    """

    def layer_budgets(self, budget: int, layers: int) -> np.ndarray:
        return np.full(layers, float(budget))
