"""The command line of all reports: `python -m kvjax.evaluate REPORT`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
from pathlib import Path

from kvjax.commands import finish
from kvjax.compilation import enable_compilation_cache

REPORTS = {
    "quality": ("kvjax.evaluate.reports.quality", "perplexity and recall of policies against the bytes that they keep"),
    "codecs": ("kvjax.evaluate.reports.codecs", "slots of 16, 8 and 4 bits at equal bytes"),
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
        report.add_argument("--model", default="tiny", help="tiny, a directory or a hub id")
        report.add_argument("--text", nargs="+", type=Path, required=True, metavar="FILE", help="held-out texts")
        report.add_argument("--out", type=Path, default=Path("docs/results"), help="directory of the report")
        report.add_argument("--rows", type=int, default=16, help="passages of each text")
        report.add_argument("--length", type=int, default=1024, help="tokens of each passage")
        report.add_argument("--redo", action="store_true", help="measure again what is on disk")
        importlib.import_module(module).add_arguments(report)
    return made


def main(argv: list[str] | None = None) -> int:
    """The command line; returns its exit code."""
    options = parser().parse_args(argv)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # tokenizers need no torch
    enable_compilation_cache()
    return finish("evaluate", lambda: importlib.import_module(REPORTS[options.report][0]).run(options))
