"""The command line of all reports: `python -m kvjax.evaluate REPORT`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from kvjax.commands import add_model_options, finish
from kvjax.compilation import enable_compilation_cache
from kvjax.evaluate.texts import check_sizes

REPORTS = {
    "quality": ("kvjax.evaluate.reports.quality", "perplexity and recall of policies against the bytes that they keep"),
    "codecs": ("kvjax.evaluate.reports.codecs", "slots of 16, 8 and 4 bits at equal bytes"),
    "weights": ("kvjax.evaluate.reports.weights", "what rounding a model's weights costs"),
    "less": ("kvjax.evaluate.reports.less", "what LESS recovers of what eviction loses"),
    "long": ("kvjax.evaluate.reports.long", "text far beyond the trained length on a fixed cache"),
    "fastgen": ("kvjax.evaluate.reports.fastgen", "what FastGen keeps, and what it costs"),
}
"""Modules with `add_arguments(parser)` and `run(options)`; one that is not there is not offered."""


def parser() -> argparse.ArgumentParser:
    """The command line: arguments that all reports share, and each report's own."""
    made = argparse.ArgumentParser(prog="kvjax evaluate", description=__doc__, allow_abbrev=False)
    reports = made.add_subparsers(dest="report", required=True, metavar="REPORT")
    for name, (module, summary) in REPORTS.items():
        if importlib.util.find_spec(module) is None:
            continue
        report = reports.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        add_model_options(report, rounded=False)
        report.add_argument("--text", nargs="+", type=Path, required=True, metavar="FILE", help="held-out texts")
        report.add_argument("--out", type=Path, default=Path("results"), help="directory of the report")
        report.add_argument("--rows", type=int, default=16, help="passages of each text")
        report.add_argument("--length", type=int, default=1024, help="tokens of each passage")
        report.add_argument("--redo", action="store_true", help="measure again what is on disk")
        importlib.import_module(module).add_arguments(report)
    return made


def main(argv: list[str] | None = None) -> int:
    """The command line; returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    options = parser().parse_args(words)
    options.command = quoted(words)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # tokenizers need no torch
    enable_compilation_cache()

    def run() -> None:
        check(options)
        importlib.import_module(REPORTS[options.report][0]).run(options)

    return finish("evaluate", run)


def check(options: argparse.Namespace) -> None:
    """Refuse what all reports need and do not get, before anything is loaded.

    Raises:
        ValueError: a text is no file, or there is nothing to predict.
    """
    for file in options.text:
        if not file.is_file():
            raise ValueError(f"--text {file} is not a file; give text files.")
    check_sizes(len(options.text), options.rows, options.length)
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out {options.out} is a file; name a directory.")


def quoted(words: Sequence[str]) -> str:
    """A command as its report shows it: all of it, with files by their names and the report's directory as DIR."""
    shown, before = [], ""
    for word in words:
        name, equals, path = word.rpartition("=")
        file = Path(path).name if os.sep in path and Path(path).exists() else path
        shown.append("DIR" if before == "--out" else f"{name}{equals}{file}")
        before = word
    return shlex.join(["kvjax", "evaluate", *shown])
