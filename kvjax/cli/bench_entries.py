"""Policies and budgets that a benchmark compares, from the command line."""

from __future__ import annotations

import argparse
import sys

from kvjax import methods
from kvjax.cli.options import add_policies, parts_of
from kvjax.methods.notation import compared
from kvjax.policies.policy import Policy
from kvjax.utils.settings import check_options, parse_budget

BenchEntry = tuple[str, Policy, int | float | str]
"""Name, policy and budget, which may be `same`."""


def bench_entries(options: argparse.Namespace) -> list[BenchEntry]:
    """Check and return the policies and budgets that the command line names, before anything is loaded.

    Callers add `full` themselves.
    """
    check_options(options, "batch", "prompt_tokens", "new_tokens", "repeats")
    everyone = options.policies == "all"
    budgets = [text if text == "same" else parse_budget(text) for text in options.budgets.split(",")]
    texts = ",".join(methods.REGISTRY) if everyone else options.policies
    made: list[BenchEntry] = []
    decided = False
    for label, policy in compared(texts, *parts_of(options), left_out=say if everyone else None).items():
        if label == "full":
            continue
        decided |= policy.plan.sizing.mode == "profiled"
        if "same" in budgets and not decided:
            raise ValueError("budget 'same' follows a policy that decides its slots; name fastgen first.")
        made += [(label, policy, budget) for budget in ([1.0] if policy.plan.sizing.mode == "profiled" else budgets)]
    if texts != "full" and not made:
        raise ValueError("no policy is left to benchmark, for the reasons above.")
    return made


def say(line: str) -> None:
    """Print a progress line to standard error."""
    print(line, file=sys.stderr, flush=True)


def add_bench_options(options: argparse.ArgumentParser) -> None:
    """Add the options of policies and budgets of a benchmark."""
    add_policies(options, "streaming,h2o", ", or all")
    options.add_argument("--budgets", default="0.25", help="slots, fractions or `same` as fastgen, separated by commas")
