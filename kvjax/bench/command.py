"""Measure speed and memory of policies and budgets: `python -m kvjax.bench decode`, `prefill`; or race `kernels`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np

from kvjax import policies
from kvjax.bench import kernels
from kvjax.bench.models import model_named
from kvjax.bench.peers import transformers_decoder
from kvjax.bench.tables import table
from kvjax.commands import add_model_options, finish
from kvjax.evaluate.speed import decoder, race, reader
from kvjax.files import write_text
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
            _say(f"{name} is left out: {error}")
            continue
        decided |= policy.plan.decides
        if "same" in budgets and not decided:
            raise ValueError("budget 'same' follows a policy that decides its slots; name fastgen first.")
        made += [(name, policy, budget) for budget in ([1.0] if policy.plan.decides else budgets)]
    if names and not made:
        raise ValueError("no policy is left to race; see why above.")
    return made


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(options: argparse.Namespace) -> None:
    """Race the contenders that the command line names.

    Raises:
        ValueError: there is no such policy, or a setting does not fit.
    """
    named = entries(options)
    model = model_named(options.model, options.dtype, options.revision, options.weights)
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, model.config.vocab_size, (options.batch, options.prompt_tokens))
    make = {
        "decode": lambda policy, budget: decoder(model, policy, budget, tokens, options.new_tokens),
        "prefill": lambda policy, budget: reader(model, policy, budget, tokens),
    }[options.what]
    _say("compiling full")
    contenders, own_slots = [make("full", 1.0)], 1
    for name, policy, budget in named:
        slots = own_slots if budget == "same" else budget
        _say(f"compiling {name}" + ("" if policy.plan.decides else f" at {slots}"))
        try:
            contenders.append(dataclasses.replace(make(policy, slots), name=name))
        except ValueError as error:
            if options.policies != "all":
                raise
            _say(f"{name} at {slots} is left out: {error}")
            continue
        if policy.plan.decides:
            own_slots = round(contenders[-1].slots or 1)
            contenders[-1].budget = f"own: {own_slots}"
    timed = contenders
    if options.against and options.what == "decode":
        timed = [*contenders, transformers_decoder(model, tokens, options.new_tokens)]
    _say(f"racing {len(contenders)} contenders, {options.repeats} rounds")
    race(contenders, options.repeats)
    if len(timed) > len(contenders):
        for _ in range(options.repeats + 1):
            timed[-1].run()
        del timed[-1].seconds[0]
    count = options.batch * (options.new_tokens if options.what == "decode" else options.prompt_tokens)
    title = (
        f"{options.what}: {model.name}, batch {options.batch}, {options.prompt_tokens} prompt tokens, "
        f"{jax.devices()[0].device_kind}, medians of {options.repeats}"
    )
    rows = table(timed, count, title)
    if options.json:
        write_text(options.json, json.dumps({"title": title, "rows": rows}, indent=1))


def main(argv: list[str] | None = None) -> int:
    """The command line; returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["kernels"]:
        return kernels.main(words[1:])
    options = argparse.ArgumentParser(prog="kvjax bench", description=__doc__, allow_abbrev=False)
    options.add_argument("what", choices=("decode", "prefill", "kernels"), help="kernels has settings of its own")
    add_model_options(options, "synthetic", "synthetic, ")
    options.add_argument("--policies", default="streaming,h2o", help="names with commas between them, or all")
    options.add_argument("--budgets", default="0.25", help="slots, fractions, or `same` as fastgen, with commas")
    for part in PART_KEYS:
        options.add_argument(f"--{part}", help=f"the {part} of all policies but full; see kvjax generate --policy list")
    options.add_argument("--set", nargs="+", action="extend", default=[], metavar="key=value", dest="settings")
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--prompt-tokens", type=int, default=4096)
    options.add_argument("--new-tokens", type=int, default=16)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options.add_argument("--against", choices=("transformers",), help="race Hugging Face's decoding, too")
    options.add_argument("--json", type=Path, help="also write the numbers to this file")
    return finish("bench", lambda: run(options.parse_args(words)))
