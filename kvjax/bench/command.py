"""Measure speed and memory of policies and budgets: `python -m kvjax.bench decode`, `prefill`; or race `kernels`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax import policies
from kvjax.bench import kernels
from kvjax.bench.models import model_named
from kvjax.bench.peers import transformers_decoder
from kvjax.bench.tables import table
from kvjax.commands import finish
from kvjax.evaluate.speed import decoder, race, reader
from kvjax.files import write_text
from kvjax.policies.policy import Policy
from kvjax.settings import PART_KEYS, parse_budget, parse_settings


def policy_with(name: str, parts: dict[str, str | None], settings: dict[str, Any]) -> Policy:
    """A policy with some parts by name, and with those of the settings that it has."""
    known = policies.settings_of(name) if name in policies.REGISTRY else {}
    own: dict[str, Any] = {key: value for key, value in settings.items() if key in known or "." in key}
    return policies.policy(name, **own | parts)


def run(options: argparse.Namespace) -> None:
    """Race the contenders that the command line names.

    Raises:
        ValueError: there is no such policy, or a setting does not fit.
    """
    model = model_named(options.model, options.dtype)
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, model.config.vocab_size, (options.batch, options.prompt_tokens))
    names = list(policies.REGISTRY) if options.policies == "all" else options.policies.split(",")
    budgets = [text if text == "same" else parse_budget(text) for text in options.budgets.split(",")]
    settings, parts = parse_settings(options.settings), {part: getattr(options, part) for part in PART_KEYS}
    make = {
        "decode": lambda name, budget: decoder(model, name, budget, tokens, options.new_tokens),
        "prefill": lambda name, budget: reader(model, name, budget, tokens),
    }[options.what]
    contenders, own_slots = [make("full", 1.0)], None
    for name in names:
        if name == "full":
            continue
        for budget in budgets:
            try:
                policy = policy_with(name, parts, settings)
                if policy.plan.decides:
                    contenders.append(dataclasses.replace(make(policy, 1.0), name=name))
                    own_slots = round(contenders[-1].slots or 1)
                    contenders[-1].budget = f"own: {own_slots}"
                    break
                if budget == "same" and own_slots is None:
                    raise ValueError("budget 'same' follows a policy that decides its slots; name fastgen first.")
                made = make(policy, own_slots if budget == "same" else budget)
                contenders.append(dataclasses.replace(made, name=name))
            except ValueError as error:
                if options.policies != "all":
                    raise
                print(f"{name} at {budget} is left out: {error}", file=sys.stderr)
    timed = contenders
    if options.against and options.what == "decode":
        timed = [*contenders, transformers_decoder(model, tokens, options.new_tokens)]
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
    options.add_argument("--model", default="synthetic", help="synthetic, tiny, a directory or a hub id")
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
