"""Slots of layers, of heads and of windows by the papers' formulas, in fractions: nothing here is asked of kvjax."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from tests.oracles.decoder import Oracle


def exact(number: float) -> Fraction:
    """A setting as it is written, 0.2 as one fifth."""
    return Fraction(str(number)).limit_denominator(10**6)


def rounded(shares: Sequence[Fraction], total: int) -> list[int]:
    """Whole numbers of this sum: what is left over goes to the largest remainders, of equal ones to the first."""
    whole = [math.floor(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda i: (whole[i] - shares[i], i))
    for i in order[: total - sum(whole)]:
        whole[i] += 1
    return whole


def uniform(budget: int, layers: int) -> list[Fraction]:
    return [Fraction(budget)] * layers


def arithmetic(budget: int, layers: int, ratio: float = 3.0) -> list[Fraction]:
    """LightKV, equations 1 and 2: C_l = C_L + (C_1 - C_L)(L - l) / (L - 1), with C_1 = ratio C_L and the sum L C."""
    if layers == 1:
        return [Fraction(budget)]
    last = Fraction(2 * budget) / (1 + exact(ratio))
    first = exact(ratio) * last
    return [last + (first - last) * Fraction(layers - number, layers - 1) for number in range(1, layers + 1)]


def pyramid(budget: int, layers: int, beta: float = 20.0, window: int = 0) -> list[Fraction]:
    """PyramidKV, 3.2: the last layer gets 1 / beta of the average, the first what twice the average leaves."""
    if layers == 1:
        return [Fraction(budget)]
    last = Fraction(math.floor((budget - window) / exact(beta)))
    first = 2 * (budget - window) - last
    return [window + first - (first - last) * Fraction(layer, layers - 1) for layer in range(layers)]


def interleaved(budget: int, layers: int, period: int = 2, ratio: float = 4.0) -> list[Fraction]:
    weights = [exact(ratio) if layer % period == 0 else Fraction(1) for layer in range(layers)]
    return [weight * budget * layers / sum(weights) for weight in weights]


LAYERS: dict[str, Callable[..., list[Fraction]]] = {
    "uniform": uniform,
    "arithmetic": arithmetic,
    "pyramid": pyramid,
    "interleaved": interleaved,
    "adakv": uniform,
}
"""Shares of the layers, by the name of the plan."""


def layer_budgets(plan: str, budget: int, layers: int, **settings: float) -> list[int]:
    """Slots of each layer's heads, for so many per layer on average."""
    return rounded(LAYERS[plan](budget, layers, **settings), layers * budget)


def recent_window(recent: int | float, slots: int) -> int:
    """The recent window of a head with so many slots: a number of tokens, or a share of the slots."""
    return math.floor(recent * slots + 1e-6) if isinstance(recent, float) else int(recent)


def allot(scores: Sequence[Sequence[float]], budget: int, floor: float, longest: int) -> list[int]:
    """Ada-KV, Algorithm 1, and its safeguard: slots of each head of a layer.

    Args:
        scores: of each head's tokens, which are compared with those of all other heads.
        budget: B / H, slots of a head on average.
        floor: share of these that every head gets, whatever its tokens score.
        longest: tokens of the whole text.
    """
    heads = len(scores)
    every = [(-score, h, i) for h, head in enumerate(scores) for i, score in enumerate(head)]
    best = sorted(every)[: heads * budget]  # of equals those of the first head, and of its tokens the oldest
    counts = [sum(1 for _, head, _ in best if head == h) for h in range(heads)]
    # A text that is too short for all slots leaves some to all heads alike.
    counts = [count + Fraction(heads * budget - len(best), heads) for count in counts]
    safe = exact(floor)
    shares = [safe * budget + (1 - safe) * count for count in counts]
    return [min(slots, longest) for slots in rounded(shares, heads * budget)]


class _AdaKV(Oracle):
    """Heads share their layer's slots once the prompt has been read; `limits` are an average head's until then."""

    floor: float
    text: int
    """Tokens of the whole text."""

    def keep(self, prompt):
        if prompt.start == 0:
            self.share(prompt)
        return super().keep(prompt)

    def share(self, prompt):
        # The token being read has one of the slots that are shared, as it has everywhere in kvjax.
        read = 0 if self.evicts_first else 1
        average = self.limits[0] + read
        # The newest token of every head has one of its slots, with any score.
        self.recents = [max(1, recent_window(self.recent, average))] * self.kv_heads
        ranks = [self.contest(h, prompt) for h in range(self.kv_heads)]
        slots = allot(ranks, average, self.floor, self.text)
        self.limits = [each - read for each in slots]
        self.recents = [max(0, recent_window(self.recent, each) - read) for each in slots]
        self.start_with(self.limits)

    def start_with(self, limits: list[int]) -> None:
        """LightKV's mask is a share of what a head has got."""
        if hasattr(self, "budgets"):
            self.budgets = list(limits)


class _AllLayers(_AdaKV):
    """Heads of all layers share their slots."""

    shared = False

    def read(self, prompt):
        super().read(prompt)
        self.whole = prompt

    def share(self, prompt):
        assert self.shared

    @staticmethod
    def share_all(oracles: Sequence[Any]) -> None:
        first = oracles[0]
        if first.shared:
            return
        read = 0 if first.evicts_first else 1
        average, ranks = first.limits[0] + read, list[list[float]]()
        for oracle in oracles:
            oracle.recents = [max(1 - read, recent_window(oracle.recent, average))] * oracle.kv_heads
            ranks += [oracle.contest(h, oracle.whole) for h in range(oracle.kv_heads)]
        slots = allot(ranks, average, first.floor, first.text)
        for oracle in oracles:
            own, slots = slots[: oracle.kv_heads], slots[oracle.kv_heads :]
            oracle.limits = [each - read for each in own]
            oracle.recents = [max(0, recent_window(oracle.recent, each) - read) for each in own]
            oracle.shared = True


@functools.cache
def over_all_layers(base: type[Oracle]) -> type[Oracle]:
    """An oracle whose heads, those of all layers, get slots by what their tokens are worth."""

    def couple(oracles: Sequence[Any]) -> None:
        base.couple(oracles)
        _AllLayers.share_all(oracles)

    return type(f"AllLayers{base.__name__}", (_AllLayers, base), {"couple": staticmethod(couple)})


@functools.cache
def adakv(base: type[Oracle]) -> type[Oracle]:
    """An oracle whose heads get slots by what their tokens are worth."""
    return type(f"AdaKV{base.__name__}", (_AdaKV, base), {})
