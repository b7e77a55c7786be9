"""Policies made of a score and common other parts."""

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
    """Return a policy with a score, a protection, and settings that nearly every policy has.

    Args:
        score: ranks the cached tokens; the lowest one is evicted first.
        sinks: first tokens of the text, which are never evicted.
        recent: newest tokens, which are never evicted, the one being read included: slots, or a fraction of the budget.
        special: token ids that are evicted only if no other token can be.
        positions: `original` to rotate keys by their positions in the text, or `cache` by their rank among the cached
            tokens.
        evict_every: number of tokens from one eviction to the next; in between a head grows beyond its budget.
        parts: further parts of the policy, as keywords of `Policy`.
    """
    usual = Policy(score, Protection(sinks, recent, special), codec=Codec(positions), evict_every=evict_every)
    return dataclasses.replace(usual, **parts)
