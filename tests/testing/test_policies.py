"""`kvjax.testing.check_policy` names the rule that a policy of one's own breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import kvjax
from kvjax.testing import CHECKS, check_policy
from tests.cases import POLICIES, slow


class Own(kvjax.Score, interface=True):
    """Attention of all queries, stored for each slot."""

    def init_slot(self, new: Any, state: Any) -> Any:
        return jnp.zeros(new.k.shape[:3])

    def attention_stats(self, heads: Any, new: Any) -> Any:
        return kvjax.AttentionSum()

    def score(self, view: Any, new: Any) -> Any:
        return view.slots.score


class NaiveAverage(Own):
    """A block counts as one token."""

    def update_slot(self, stats: Any, view: Any, new: Any) -> Any:
        return 0.9 * view.slots.score + 0.1 * stats


class OverRows(Own):
    """Rows further down count more."""

    def update_slot(self, stats: Any, view: Any, new: Any) -> Any:
        return view.slots.score + stats * jnp.arange(len(stats))[:, None, None]


@pytest.mark.parametrize(
    ("score", "check"),
    [(NaiveAverage, "blocks"), (OverRows, "order of rows"), (OverRows, "padding")],
)
def test_a_policy_that_breaks_a_rule_fails_its_check(score: Callable[[], Any], check: str) -> None:
    with pytest.raises(AssertionError, match=f"fails the check '{check}'"):
        check_policy(score(), check)


def test_checks_are_known_by_name() -> None:
    with pytest.raises(ValueError, match=r"'row' is no check; there are room, blocks, "):
        check_policy("h2o", "row")


@pytest.mark.parametrize("name", [name if name == "h2o" else slow(name) for name in POLICIES])
def test_every_policy_passes(name: str) -> None:
    # policies/test_contract.py runs others of the checks on every case.
    check_policy(POLICIES[name].make(), *(CHECKS if name != "h2o" else ("blocks", "turns")))
