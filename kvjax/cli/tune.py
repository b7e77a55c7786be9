"""Benchmark the kernels of a model's prompts and decode steps on this machine's GPU, and print the winners."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Column, Table

from kvjax.cli.commands import Parser, add_model_options, command, load_model
from kvjax.cli.options import add_policy_options, console, policy_and_budget
from kvjax.inference.decoder import step_shapes
from kvjax.inference.extend import prefill
from kvjax.inference.prepare import bind_policy
from kvjax.inference.shapes import state_shapes
from kvjax.model import Model
from kvjax.policies.policy import Policy
from kvjax.types import Kernels
from kvjax.utils import autotune
from kvjax.utils.autotune import Autotuner
from kvjax.utils.settings import whole_number
from pallas_kernels import common, op
from pallas_kernels.benchmark import TuningResult
from pallas_kernels.common import Survey

NAMES = common.IMPLEMENTATIONS[1:]


def survey(model: Model, policy: Policy, rows: int, tokens: int, **reading: Any) -> Survey:
    """Collect the kernel workloads of `rows` prompts of `tokens` tokens and of a decode step after them.

    `reading` has the budget and similar settings, as `kvjax.prefill` takes them.
    """
    workloads = Survey()
    settings: dict[str, Any] = dict(reading, implementation=Kernels(workloads))
    sizing = bind_policy(model, policy, reading["budget"], None).plan.sizing
    if sizing.per_head:  # only a prompt determines the slots of each head
        state, _ = prefill(model, policy, np.zeros((rows, tokens), np.int32), **settings)
    else:
        state = state_shapes(model, policy, rows, tokens, **settings)
    step_shapes(state.decoder, state.cache)
    return workloads


def results_table(title: str, verdicts: dict[str, TuningResult | None]) -> Table:
    """Build a table of tuning results by bucket; None marks a workload that only one implementation supports."""
    folded = (Column(heading, overflow="fold") for heading in ("operation", "shape"))
    headings = *(f"{name} µs" for name in NAMES), "error", "winner"
    numbers = (Column(heading, justify="right", no_wrap=True) for heading in headings)
    shown = Table(*folded, *numbers, title=title, title_justify="left")
    for bucket, verdict in verdicts.items():
        op, _, shape = bucket.partition(" ")
        if verdict is None:
            shown.add_row(op, shape, *("" for _ in NAMES), "", "xla, alone")
            continue
        times = (verdict.microseconds.get(name) for name in NAMES)
        errors = [error for name, error in verdict.errors.items() if name != "xla"]
        worst = "none" if not errors else "NaN" if None in errors else f"{max(e for e in errors if e is not None):.0e}"
        cells = ("" if time is None else f"{time:,.1f}" for time in times)
        shown.add_row(op, shape, *cells, worst, verdict.order[0] if verdict.order else "none")
    return shown


def print_results(file: Path | None) -> None:
    """Print all tuning results that are cached on this machine."""
    devices = {} if file is None else autotune.read(file)
    if not devices:
        where = "KVJAX_CACHE_DIR is empty, so that none are kept" if file is None else f"none are in {file}"
        print(f"There are no tuning results: {where}.")
        return
    print(file)
    for kind, verdicts in devices.items():
        console(160).print(results_table(kind, dict(verdicts)))


def run(options: argparse.Namespace) -> None:
    """Run the command line."""
    file = autotune.verdicts_file()
    if options.show:
        print_results(file)
        return
    sizes = [
        (whole_number("--batch", b), whole_number("--prompt-length", n))
        for b in options.batch
        for n in options.prompt_length
    ]
    policy, reading = policy_and_budget(options)
    device = autotune.tuned_device()
    if device is None:
        raise ValueError(_why_not())
    model = load_model(options)
    tasks: dict[str, common.TuningTask] = {}
    for rows, tokens in sizes:
        tasks |= survey(model, policy, rows, tokens, max_new_tokens=options.max_new_tokens, **reading).requests
    new_verdicts = Autotuner(device).settle(tasks.values(), again=options.again)
    verdicts = ({} if file is None else autotune.read(file).get(device, {})) | new_verdicts
    console(160).print(results_table(f"{model.name} on {device}", {bucket: verdicts.get(bucket) for bucket in tasks}))
    if file is not None:
        print(f"stored in {file}", file=sys.stderr)


def _why_not() -> str:
    platform = op.platform_of(None)
    if platform not in ("gpu", "tpu"):
        return (
            f"there is nothing to benchmark on {platform}, where each operation has one implementation; run it on "
            "a machine with a GPU, or add --show."
        )
    kind = op.kind_of_device(platform)
    if kind in common.LISTED:
        return (
            f"kernels on {kind} are chosen by its compiler's schedules, without benchmarks; kvjax bench kernels "
            "times kernels, and --kernels chooses them."
        )
    return f"{autotune.VARIABLE}=off disables benchmarks; unset it."


def parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    options = Parser(prog="kvjax tune", description=__doc__)
    add_model_options(options, processes=False, kernels=False)
    add_policy_options(options, "full", 1.0, "text")
    options.add_argument("--batch", type=int, nargs="+", default=[1], help="numbers of prompts per batch")
    options.add_argument("--prompt-length", type=int, nargs="+", default=[512], help="lengths of prompts in tokens")
    options.add_argument("-n", "--max-new-tokens", type=int, default=256, help="number of tokens to generate")
    options.add_argument("--again", action="store_true", help="also repeat cached benchmarks")
    options.add_argument("--show", action="store_true", help="only print the cached results of all models and devices")
    return options


main = command("tune", parser, run)
"""Run the command line and return its exit code."""
