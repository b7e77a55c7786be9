"""Plans: how many slots each layer and head may use, and when, whatever the score that fills them."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from kvjax.policies.base import Part
from kvjax.types import Heads, New, PyTree, View, number, written


class Quota(NamedTuple):
    """How many tokens a head may hold for their score alone."""

    most: Int[Array, "b h"]
    among_all: bool
    """Whether protected tokens take such a place, too, where they score among the highest."""


@struct.dataclass(kw_only=True)
class Plan(Part):
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


@struct.dataclass
class Arithmetic(Plan):
    r"""Budgets fall by equal steps from the first layer to the last.

    .. math:: C_l = C_L + (C_1 - C_L) \frac{L - l}{L - 1}, \quad \sum_l C_l = C_{total}

    From: LightKV, eq. 1, 2.

    When: with `lightkv`, whose plan it is. Over `h2o` it costs: 15.4 instead of 14.9 in perplexity with a quarter of
    the slots, 19.0 instead of 18.0 with a tenth (SmolLM2 on WikiText-2).

    Args:
        ratio: C_1 / C_L, at least 1.
    """

    ratio: float = number(3.0)

    def __post_init__(self) -> None:
        if written(self.ratio) and self.ratio < 1:
            raise ValueError(f"ratio={self.ratio!r} is not a ratio of the first layer's slots to the last's from 1.")

    def shares(self, budget: int, layers: int) -> np.ndarray:
        last = 2 * budget / (1 + self.ratio)
        return np.linspace(self.ratio * last, last, layers) if layers > 1 else np.full(1, float(budget))


@struct.dataclass
class Pyramid(Plan):
    r"""Budgets fall by equal steps to a small share in the last layer, on top of a window.

    .. math:: C_l = w + k_l, \quad k_L = \lfloor (C - w) / \beta \rfloor, \quad k_1 = 2 (C - w) - k_L

    with the k of the other layers on a line between, and C slots per layer on average.

    From: PyramidKV, 3.2.

    When: with `pyramidkv`, whose plan it is. Over `h2o` it costs: 16.1 instead of 14.9 in perplexity with a quarter
    of the slots, 21.8 instead of 18.0 with a tenth (SmolLM2 on WikiText-2).

    Args:
        beta: the last layer gets 1/beta of the average beyond the window, at least 1.
        window: slots that every layer gets first.
    """

    beta: float = number(20.0)
    window: int = number(0)

    def __post_init__(self) -> None:
        if written(self.beta, self.window) and (self.beta < 1 or self.window < 0):
            raise ValueError(f"beta={self.beta!r}, window={self.window!r} are not a divisor from 1 and slots from 0.")

    def shares(self, budget: int, layers: int) -> np.ndarray:
        if layers == 1:
            return np.full(1, float(budget))
        beyond = budget - self.window
        if beyond < 0:
            raise ValueError(f"a budget of {budget} slots per layer does not hold the window of {self.window} slots.")
        last = beyond // self.beta
        return self.window + np.linspace(2 * beyond - last, last, layers)


@struct.dataclass
class Interleaved(Plan):
    r"""One layer in every `period`, the first of them included, gets `ratio` times the slots of the others.

    .. math:: C_l \propto r \ \text{if}\ l \equiv 0 \pmod{\text{period}}, \ \text{else}\ 1

    From: kvjax, as a control for plans that rise or fall.

    When: to look for layers that need more. Over `h2o` it is level with `uniform` at a quarter of the slots (14.8 and
    14.9 in perplexity) and behind at a tenth (19.0 and 18.0; SmolLM2 on WikiText-2).

    Args:
        period: layers from one rich layer to the next, at least 2.
        ratio: slots of a rich layer over those of a poor one, at least 1.
    """

    period: int = number(2)
    ratio: float = number(4.0)

    def __post_init__(self) -> None:
        if written(self.period, self.ratio) and (self.period < 2 or self.ratio < 1):
            raise ValueError(f"period={self.period!r}, ratio={self.ratio!r} are not layers from 2 and a ratio from 1.")

    def shares(self, budget: int, layers: int) -> np.ndarray:
        weights = np.where(np.arange(layers) % self.period == 0, self.ratio, 1.0)
        return weights * (budget * layers / weights.sum())


@struct.dataclass
class AdaKV(Uniform):
    r"""Every layer gets the same, every head of it what its tokens are worth.

    .. math:: C_h = f C + (1 - f) n_h, \quad n_h = \text{tokens of head}\ h\ \text{among the layer's}\ H C\ \text{best}

    The tokens that rank highest among all heads of the layer are counted by head, and a head gets a share f of the
    average C, the setting `floor`, and the rest by its count. Per row and layer, heads together get what equal ones
    would, unless one of them would get more slots than the text has tokens.

    From: Ada-KV, Feng et al. 2024, Algorithm 1.

    When: where heads of a layer differ much. In SmolLM2, with 3 KV heads, it gains nothing over `h2o`: 15.2 instead
    of 14.9 in perplexity with a quarter of the slots, 18.3 instead of 18.0 with a tenth (WikiText-2), and pages take
    more bytes.

    Args:
        floor: share of the average that is safe from the others, in [0, 1]; 0.2 in the published code.
    """

    per_head: ClassVar[bool] = True

    floor: float = number(0.2)

    def __post_init__(self) -> None:
        if written(self.floor) and not 0 <= self.floor <= 1:
            raise ValueError(f"floor={self.floor!r} is not a share of the average budget in [0, 1].")

    def settle(
        self, answers: PyTree, view: View, ranks: Float[Array, "b h c"] | None, new: New
    ) -> tuple[Int[Array, "b h"], PyTree]:
        """Slots by the number of a head's tokens among the layer's best."""
        assert ranks is not None
        every, budget = new.spread.all_heads(ranks), new.spread.all_heads(view.limit)
        limit = self.split(every, budget, (new.read + new.horizon)[:, None])
        return new.spread.own_heads(limit), view.state.plan

    def split(
        self, ranks: Float[Array, "b h c"], budget: Int[Array, "b h"], most: Int[Array, "b 1"]
    ) -> Int[Array, "b h"]:
        """Slots per KV head of a layer.

        Args:
            ranks: of the prompt's slots.
            budget: slots per head on average.
            most: tokens of the whole text, more than which no head can use.
        """
        rows, heads, slots = ranks.shape
        total = budget.sum(1, keepdims=True)
        head = jnp.broadcast_to(jnp.arange(heads)[:, None], ranks.shape).reshape(rows, -1)
        worth = jnp.where(ranks > jnp.finfo(ranks.dtype).min, -ranks, jnp.inf).reshape(rows, -1)
        worth, head = jax.lax.sort((worth, head), num_keys=1)
        # Protected slots rank +inf: they come first, as they will when slots are given out.
        best = (jnp.arange(heads * slots) < total) & (worth < jnp.inf)
        counts = (best[:, None] & (head[:, None] == jnp.arange(heads)[:, None])).sum(-1)
        left = total - counts.sum(1, keepdims=True)
        shares = self.floor * budget + (1 - self.floor) * (counts + left / heads)
        whole = jnp.floor(shares + 1e-4).astype(jnp.int32)
        # Of equal remainders the first head's counts, whichever way a program rounds them.
        remainders = jnp.round((shares - whole) * 64)
        order = jnp.argsort(jnp.argsort(-remainders, axis=-1, stable=True), axis=-1)
        whole += order < total - whole.sum(1, keepdims=True)
        return jnp.minimum(whole, most).astype(jnp.int32)


@struct.dataclass
class Unbounded(Uniform):
    r"""Nothing leaves: every head has room for the prompt and all planned tokens.

    .. math:: o = \mathrm{softmax}(q K^\top / \sqrt d) V \quad \text{over all tokens}
    """

    bounded: ClassVar[bool] = False
    ends: ClassVar[bool] = True

    def spread_by(self, other: Plan) -> Plan:
        """Refuse a plan: there is nothing to spread."""
        raise ValueError(
            f"nothing leaves this cache, so plan={type(other).__name__} means nothing to it; leave it out, or choose "
            "another policy such as h2o."
        )
