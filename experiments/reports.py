"""The reports that `kvjax evaluate` runs in a checkout, with the options that all of them share."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

from kvjax.cli.commands import add_model_options
from kvjax.evaluation.texts import check_texts
from kvjax.utils.files import output_directory

REPORTS = {
    "quality": ("experiments.quality", "perplexity and recall of policies against bytes of the cache"),
    "codecs": ("experiments.codecs", "slots of 16, 8 and 4 bits at equal bytes"),
    "weights": ("experiments.weights", "loss of quality with 8-bit weights"),
    "less": ("experiments.less", "quality that LESS recovers"),
    "long": ("experiments.long", "quality beyond the trained length on a fixed cache"),
    "fastgen": ("experiments.fastgen", "tokens that FastGen keeps, and their cost"),
    "claims": ("experiments.papers", "claims of five papers, tested on some models"),
}
"""Modules with `add_arguments(parser)` and `run(options)`."""


def add_parsers(reports: Any) -> None:
    """Add the parser of each report, which runs it."""
    for name, (module, summary) in REPORTS.items():
        report = reports.add_parser(name, help=summary, description=summary)
        add_model_options(report, dtype=None, rounded=False, processes=False, kernels=False)
        report.add_argument("--text", nargs="+", type=Path, required=True, metavar="FILE", help="held-out texts")
        report.add_argument("--out", type=output_directory, default="results", help="directory for the report")
        report.add_argument("--rows", type=int, default=16, help="passages of each text")
        report.add_argument("--length", type=int, default=1024, help="tokens of each passage")
        report.add_argument("--redo", action="store_true", help="repeat measurements that are on disk")
        importlib.import_module(module).add_arguments(report)
        report.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run the report that the command line names."""
    check_texts(options.text, options.rows, options.length)
    importlib.import_module(REPORTS[options.report][0]).run(options)
