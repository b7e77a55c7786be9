"""Measure what policies and budgets cost in quality, or write reports of such measurements."""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax.cli.commands import Parser, add_model_options, finish, load_model, module_exists
from kvjax.cli.options import add_policies, parts_of
from kvjax.evaluation import report as report_page
from kvjax.evaluation.grid import RowFile, entries
from kvjax.evaluation.summary import print_table
from kvjax.evaluation.tasks import TASKS, texts
from kvjax.evaluation.texts import SAMPLE
from kvjax.utils.files import output_directory

REPORTS = ("quality", "codecs", "weights", "less", "long", "fastgen", "claims")
"""Commands of `experiments.reports`, which exist only in a checkout."""


def parser() -> argparse.ArgumentParser:
    """Build the parser of all tasks and reports; each of them sets `run`, which gets the options."""
    root = Parser(prog="kvjax evaluate", description=__doc__)
    reports = root.add_subparsers(dest="report", required=True, metavar="TASK")
    for name, task in TASKS.items():
        task.add_arguments(_add_grid(reports, name, task.summary, [name]))
    what = "compare policies, including your own: perplexity, and agreement with the full cache"
    compare = _add_grid(reports, "compare", what, ("perplexity", "fidelity"))
    texts.add_text_options(compare, default=[SAMPLE], rows=4, lengths=[512])
    compare.set_defaults(masked=None)
    pages = "results of tasks on one page, as Markdown and HTML"
    report = reports.add_parser("report", help=pages, description=pages)
    report_page.add_arguments(report)
    report.set_defaults(run=report_page.run)
    if module_exists("experiments.reports"):
        importlib.import_module("experiments.reports").add_parsers(reports)
    return root


def _add_grid(tasks: Any, name: str, summary: str, measured: Sequence[str]) -> argparse.ArgumentParser:
    """Add a command that compares policies at budgets by some tasks."""
    task = tasks.add_parser(name, help=summary, description=summary)
    add_model_options(task)
    add_policies(task, "streaming,h2o,keyformer")
    task.add_argument("--budgets", default="0.05,0.1,0.25", help="slots, or fractions of the whole text")
    task.add_argument("--out", type=output_directory, default="results", help="directory for TASK.jsonl and TASK.csv")
    task.set_defaults(run=functools.partial(measure_tasks, measured))
    return task


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    root = parser()
    if words and words[0] in REPORTS and not module_exists("experiments.reports"):
        root.error(f"the report {words[0]} is not installed; run kvjax from a checkout, which has experiments.reports")
    options = root.parse_args(words)
    options.command = quoted(words)
    processes = vars(options).get("distributed")
    return finish("evaluate", lambda: options.run(options), processes, loads_model=True)


def measure_tasks(names: Sequence[str], options: argparse.Namespace) -> None:
    """Measure the missing cells of some tasks, and print a table."""
    tasks = {name: TASKS[name] for name in names}
    compared = entries(options.policies, options.budgets, *parts_of(options))
    for task in tasks.values():
        task.check(options)
    files = {name: RowFile(options.out / f"{name}.jsonl") for name in tasks}
    model = load_model(options)
    measured = {name: task.fill(files[name], model, options, compared) for name, task in tasks.items()}
    print_table(measured.values())
    for name, results in measured.items():
        print(f"{files[name].file}: {sum(map(len, results.rows))} rows, new or from earlier runs, by {options.command}")


def quoted(words: Sequence[str]) -> str:
    """Return a command as its report shows it, with names for file paths and DIR for the report's directory."""
    shown, before = [], ""
    for word in words:
        name, equals, path = word.rpartition("=")
        file = Path(path).name if os.sep in path and Path(path).exists() else path
        shown.append("DIR" if before == "--out" else f"{name}{equals}{file}")
        before = word
    return shlex.join(["kvjax", "evaluate", *shown])
