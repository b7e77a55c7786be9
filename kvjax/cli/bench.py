"""Measure the speed and memory of policies in `decode` or `prefill`, or run another benchmark such as `kernels`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys

import jax
import numpy as np

from kvjax import methods
from kvjax.cli.commands import Parser, add_model_options, finish, module_exists
from kvjax.cli.options import add_policies, parts_of
from kvjax.evaluation import bench
from kvjax.evaluation.refusals import Unsupported, refusals
from kvjax.methods.notation import compared
from kvjax.policies.policy import Policy
from kvjax.utils.files import output_file, write_text
from kvjax.utils.settings import check_options, parse_budget

OTHERS = {"kernels": "kvjax.cli.bench_kernels"} | {
    name: f"benchmarks.{name}" for name in ("parts", "scale", "deployments", "serving", "weights", "lossless")
}
"""Modules of other benchmarks; those of `benchmarks` exist only in a checkout."""
BenchEntry = tuple[str, Policy, int | float | str]
"""Name, policy and budget, which may be `same`."""


def bench_entries(options: argparse.Namespace) -> list[BenchEntry]:
    """Check and return the policies and budgets that the command line names, before anything is loaded.

    Callers add `full` themselves.
    """
    check_options(options, "batch", "prompt_tokens", "new_tokens", "repeats")
    all_policies = options.policies == "all"
    budgets = [text if text == "same" else parse_budget(text) for text in options.budgets.split(",")]
    texts = ",".join(methods.REGISTRY) if all_policies else options.policies
    entries: list[BenchEntry] = []
    decided = False
    for label, policy in compared(texts, *parts_of(options), left_out=say if all_policies else None).items():
        if label == "full":
            continue
        decided |= policy.plan.sizing.mode == "profiled"
        if "same" in budgets and not decided:
            raise ValueError("budget 'same' follows a policy that decides its slots; name fastgen first.")
        entries += [(label, policy, budget) for budget in ([1.0] if policy.plan.sizing.mode == "profiled" else budgets)]
    if texts != "full" and not entries:
        raise ValueError("no policy is left to benchmark, for the reasons above.")
    return entries


def say(line: str) -> None:
    """Print a progress line to standard error."""
    print(line, file=sys.stderr, flush=True)


def add_bench_options(options: argparse.ArgumentParser) -> None:
    """Add the options of policies and budgets of a benchmark."""
    add_policies(options, "streaming,h2o", ", or all")
    options.add_argument("--budgets", default="0.25", help="slots, fractions or `same` as fastgen, separated by commas")


def run(options: argparse.Namespace) -> None:
    """Benchmark the policies that the command line names."""
    entries = bench_entries(options)
    model = bench.model_named(options.model, options.dtype, options.revision, options.weights, options.mesh)
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, model.config.vocab_size, (options.batch, options.prompt_tokens))
    make = {
        "decode": lambda policy, budget: bench.decoder(model, policy, budget, tokens, options.new_tokens),
        "prefill": lambda policy, budget: bench.reader(model, policy, budget, tokens),
    }[options.what]
    say("compiling full")
    contenders, profiled_slots = [make("full", 1.0)], 1
    for name, policy, budget in entries:
        slots = profiled_slots if budget == "same" else budget
        say(f"compiling {name}" + ("" if policy.plan.sizing.mode == "profiled" else f" at {slots}"))
        try:
            with refusals():
                contenders.append(dataclasses.replace(make(policy, slots), name=name))
        except Unsupported as error:
            say(f"{name} at {slots} is left out: {error}")
            continue
        if policy.plan.sizing.mode == "profiled":
            profiled_slots = round(contenders[-1].slots or 1)
            contenders[-1].budget = f"own: {profiled_slots}"
    if entries and len(contenders) == 1:
        raise ValueError("no policy is left to benchmark, for the reasons above.")
    peer = bench.transformers_model(model) if options.against else None
    say(f"timing {len(contenders)} programs, {options.repeats} rounds")
    bench.race(contenders, options.repeats)
    steps = options.new_tokens if options.what == "decode" else None
    if peer is not None:
        contenders.append(bench.time_transformers(peer, model, tokens, steps, options.repeats))
    count = options.batch * (steps or options.prompt_tokens)
    title = (
        f"{options.what}: {model.name}, batch {options.batch}, {options.prompt_tokens} prompt tokens, "
        f"{jax.devices()[0].device_kind}, medians of {options.repeats}"
    )
    rows = bench.print_timings(contenders, count, title)
    if options.json:
        write_text(options.json, json.dumps({"title": title, "rows": rows}, indent=1))


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    options = Parser(prog="kvjax bench", description=__doc__)
    if words and words[0] in OTHERS:
        module = OTHERS[words[0]]
        if not module_exists(module):
            options.error(f"{words[0]} is not installed; run `python -m {module}` from a checkout of kvjax")
        return importlib.import_module(module).main(words[1:])
    options.add_argument(
        "what", choices=("decode", "prefill", *OTHERS), help=f"{', '.join(OTHERS)} have separate options"
    )
    add_model_options(options, "synthetic", "synthetic, ")
    add_bench_options(options)
    for name, default in (("batch", 8), ("prompt-tokens", 4096), ("new-tokens", 16), ("repeats", 5)):
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--against", choices=("transformers",), help="also time Hugging Face transformers")
    options.add_argument("--json", type=output_file, help="also write the numbers to this file")
    chosen = options.parse_args(words)
    return finish("bench", lambda: run(chosen), chosen.distributed)
