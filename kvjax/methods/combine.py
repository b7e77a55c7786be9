"""Policies from a score and the parts that nearly all of them have."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.policies.codec import Codec
from kvjax.policies.policy import Policy
from kvjax.policies.protection import Protection
from kvjax.policies.score import Score


def combine(
    score: Score,
    *,
    sinks: int = 0,
    recent: int | float = 0,
    special: tuple[int, ...] = (),
    positions: str = "original",
    evict_every: int = 1,
    **parts: Any,
) -> Policy:
    """Combine a score with what nearly every policy has to a policy.

    Args:
        score: which cached token matters least.
        sinks: first tokens of the text that never leave.
        recent: newest tokens that never leave, the one being read included: slots, or a fraction of the budget.
        special: token ids that leave only where no other token can.
        positions: `original`, or `cache` to let the model see a key's place in the cache as its position.
        evict_every: tokens from one eviction to the next, between which a head grows beyond its budget.
        parts: others, in place of the usual ones.
    """
    usual = Policy(score, Protection(sinks, recent, special), codec=Codec(positions), evict_every=evict_every)
    return dataclasses.replace(usual, **parts)
