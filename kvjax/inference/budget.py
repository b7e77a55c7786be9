"""Budgets: the slots of each layer, row and head."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.inference.padding import full_slots, round_slots
from kvjax.methods.registry import name_of
from kvjax.models.config import ModelConfig
from kvjax.policies.allocation import layer_slots
from kvjax.policies.policy import Policy
from kvjax.utils.settings import whole_number

Budget = int | float | Sequence[int]
BUDGET_BASES = ("text", "prompt", "context")
"""Bases of a fractional budget."""


def checked_budget(budget: Any) -> Budget:
    """Return a budget as Python numbers; refuse other types and budgets that no cache can count."""
    if isinstance(budget, (list, tuple, np.ndarray)) and np.ndim(budget) > 0:
        return [whole_number("budget", slots) for slots in budget]
    if isinstance(budget, (float, np.floating)):
        return float(budget)
    if isinstance(budget, (bool, np.bool_)) or not isinstance(budget, (int, np.integer)):
        raise TypeError(
            f"budget={budget!r} is not a number of slots, a fraction of the text, nor slots for each layer."
        )
    if budget >= 2**31:
        raise ValueError(f"budget={budget} is more slots than a cache can count, 2147483647.")
    return int(budget)


def plan_slots(
    policy: Policy,
    budget: Budget,
    lengths: Int[np.ndarray, " b"],
    max_new_tokens: int | Int[np.ndarray, " b"],
    config: ModelConfig,
    width: int,
    budget_of: str = "text",
    beyond_window: int = 0,
) -> tuple[list[Int[np.ndarray, "b _"]], tuple[int, ...]]:
    """Plan the slots that each row and head may use, and those of the buffers, by layer.

    Args:
        budget: slots per head, a fraction, or slots for each layer with attention. Layers that are bounded by their own
            window get as many slots as the window is wide; the budget is distributed over the others with attention.
        lengths: tokens of each prompt.
        max_new_tokens: planned number of later tokens, of all rows or of each.
        width: tokens of the longest prompt.
        budget_of: base of a fraction, one of `BUDGET_BASES`.
        beyond_window: tokens before a layer's window that stay under a policy that keeps everything.

    Raises:
        ValueError: the budget is not positive, or does not fit the layers or the policy's protections.
    """
    rows, total, plan = len(lengths), lengths + max_new_tokens, policy.plan
    one = isinstance(budget, (int, float, np.integer, np.floating))
    if budget_of not in BUDGET_BASES:
        raise ValueError(f"budget_of={budget_of!r} is not one of {', '.join(BUDGET_BASES)}.")
    bases = {"text": total, "prompt": lengths, "context": np.full(rows, config.max_positions)}
    per_row = _slots_per_row(budget, bases[budget_of]) if one else total  # type: ignore[arg-type]
    widths = [np.iinfo(np.int32).max if layer.window is None else layer.window for layer in config.layer_configs]
    windows = np.array(widths)[:, None]
    if plan.sizing.mode != "budget":
        slots = full_slots(width, int(np.max(max_new_tokens)))
        buffers = tuple(min(slots, round_slots(window + beyond_window)) for window in widths)
        return _of_heads(np.minimum(total, windows + beyond_window), config), _with_slots(buffers, config)
    windowed = np.stack([layer.bounded_by_window(total) for layer in config.layer_configs])
    stores = np.array([layer.stores for layer in config.layer_configs])
    fixed = windowed | ~stores[:, None]
    if windowed.any() and policy.score.requires.shared_slots == "layers":
        raise ValueError(
            f"{name_of(policy)} with one score for all layers needs the same tokens in all of them, but some layers of "
            "this model see a window of the text; use shared=False."
        )
    if one:
        limits = np.zeros((config.layers, rows), np.int64)
        for row, slots in enumerate(per_row):
            free = ~fixed[:, row]
            limits[free, row] = layer_slots(plan, int(slots), int(free.sum()))
    else:
        slots = np.asarray(budget)
        if len(slots) != stores.sum() or slots.min() < 1:
            which = "layers" if stores.all() else "layers with slots of their own"
            raise ValueError(
                f"budget={slots.tolist()} is not a number of slots from 1 for each of {stores.sum()} {which}."
            )
        limits = np.zeros((config.layers, rows), np.int64)
        limits[stores] = slots[:, None]
    limits = limits + plan.extra_slots
    row = int(np.where(fixed, np.iinfo(np.int64).max, limits).min(0).argmin())
    free = int((~fixed[:, row]).sum())
    if one:
        policy.protection.check_budget(
            int(per_row[row]), lambda slots: int(layer_slots(plan, slots, free).min()) + plan.extra_slots
        )
    else:
        policy.protection.check_budget(int(limits[~fixed].min()))
    if policy.score.requires.shared_slots == "layers" and (limits[stores] != limits[stores][0]).any():
        raise ValueError(f"{name_of(policy)} with one score for all layers needs equal budgets; use plan='uniform'.")
    # A layer cannot use more slots than its window.
    limits = np.where(windowed, windows, np.minimum(limits, windows))
    buffers, planned = limits.max(1, where=windowed, initial=0), functools.cache(policy.buffer_slots)
    for layer, in_window in enumerate(windowed):
        if not in_window.all():
            largest = int(limits[layer, ~in_window].max())
            buffers[layer] = max(buffers[layer], planned(largest, int(lengths.min())))
    return _of_heads(limits, config), _with_slots([round_slots(int(slots)) for slots in buffers], config)


def lines_of(limits: Sequence[Int[np.ndarray, "b _"]]) -> tuple[int, ...]:
    """Return the largest limit of each layer, rounded like buffers so that programs are shared."""
    return tuple(round_slots(int(limit.max(initial=0))) for limit in limits)


def _with_slots(slots: Sequence[int], config: ModelConfig) -> tuple[int, ...]:
    # Slots of the buffers; layers without slots of their own have none.
    return tuple(count * layer.stores for count, layer in zip(slots, config.layer_configs, strict=True))


def _of_heads(limits: Int[np.ndarray, "layers b"], config: ModelConfig) -> list[Int[np.ndarray, "b _"]]:
    # Limits of heads; layers without slots of their own have none.
    layers = zip(limits, config.layer_configs, strict=True)
    return [np.repeat(limit[:, None] * layer.stores, layer.kv_heads, axis=1) for limit, layer in layers]


def _slots_per_row(budget: int | float, base: Int[np.ndarray, " b"]) -> Int[np.ndarray, " b"]:
    if isinstance(budget, (int, np.integer)):
        if budget < 1:
            raise ValueError(f"budget={budget} is not a number of slots from 1, nor a fraction between 0.0 and 1.0.")
        return np.full(len(base), budget)
    if not 0 < budget <= 1:
        raise ValueError(f"budget={budget} is not a fraction in (0.0, 1.0], nor a whole number of slots.")
    return np.maximum(1, np.floor(budget * base + 1e-6).astype(np.int64))
