"""Checks that a policy of your own keeps the contract of all policies."""

from __future__ import annotations

from kvjax.testing.policies import CHECKS as CHECKS
from kvjax.testing.policies import check_policy as check_policy
