"""How a budget is spread over the layers, whatever the score that fills it."""

from __future__ import annotations

import abc
import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Plan(abc.ABC):
    """Gives every layer its slots; all layers together always get exactly `layers * budget`."""

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


@dataclasses.dataclass(frozen=True)
class Uniform(Plan):
    """Every layer gets the same number of slots."""

    def shares(self, budget: int, layers: int) -> np.ndarray:
        return np.full(layers, float(budget))


PLANS: dict[str, type[Plan]] = {"uniform": Uniform}
