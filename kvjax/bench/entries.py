"""Which policies a benchmark compares, at which budgets: what command lines say of them."""

from __future__ import annotations

import argparse
import sys

from kvjax import policies
from kvjax.policies.policy import Policy
from kvjax.settings import PART_KEYS, parse_budget, parse_settings

Entry = tuple[str, Policy, int | float | str]
"""A policy under its name, and its budget, which may be `same`."""


def entries(options: argparse.Namespace) -> list[Entry]:
    """What the command line names, checked before anything is loaded; `full` is added by who races them.

    Raises:
        ValueError: there is no such policy or part, nobody has a setting, or a number is out of its range.
    """
    for name in ("batch", "prompt_tokens", "new_tokens", "repeats"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)} is not a whole number from 1.")
    everyone = options.policies == "all"
    names = [name for name in (policies.REGISTRY if everyone else options.policies.split(",")) if name != "full"]
    budgets = [text if text == "same" else parse_budget(text) for text in options.budgets.split(",")]
    settings, parts = parse_settings(options.settings), {part: getattr(options, part) for part in PART_KEYS}
    known = {name: policies.settings_of(name) if name in policies.REGISTRY else {} for name in names}
    for setting in settings:
        if "." not in setting and not any("base" in its or setting in its for its in known.values()):
            raise ValueError(f"--set {setting}: none of the policies {options.policies} has this setting.")
    made: list[Entry] = []
    decided = False
    for name in names:
        own = {key: value for key, value in settings.items() if key in known[name] or "." in key}
        try:
            policy = policies.policy(name, **own | parts)
        except ValueError as error:
            if not everyone:
                raise
            say(f"{name} is left out: {error}")
            continue
        decided |= policy.plan.decides
        if "same" in budgets and not decided:
            raise ValueError("budget 'same' follows a policy that decides its slots; name fastgen first.")
        made += [(name, policy, budget) for budget in ([1.0] if policy.plan.decides else budgets)]
    if names and not made:
        raise ValueError("no policy is left to race; see why above.")
    return made


def say(line: str) -> None:
    """A line about what is going on, beside the table."""
    print(line, file=sys.stderr, flush=True)


def add_policy_options(options: argparse.ArgumentParser) -> None:
    """The options that `entries` reads, but for the sizes."""
    options.add_argument("--policies", default="streaming,h2o", help="names with commas between them, or all")
    options.add_argument("--budgets", default="0.25", help="slots, fractions, or `same` as fastgen, with commas")
    for part in PART_KEYS:
        options.add_argument(f"--{part}", help=f"the {part} of all policies but full; see kvjax generate --policy list")
    options.add_argument("--set", nargs="+", action="extend", default=[], metavar="key=value", dest="settings")
