"""What FastGen keeps, and what it costs: `python -m kvjax.evaluate fastgen`, the figures and tables of the paper."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from kvjax.evaluate.reports.claims import claims_table
from kvjax.evaluate.reports.fastgen.attention import STEPS, choices, stability
from kvjax.evaluate.reports.fastgen.cost import cost, profiling
from kvjax.evaluate.reports.fastgen.measurements import Report, Section
from kvjax.evaluate.reports.fastgen.quality import ablations, quality, recalled
from kvjax.evaluate.runs import Runs
from kvjax.evaluate.store import Store
from kvjax.evaluate.texts import passages
from kvjax.files import write_text

SECTIONS: dict[str, Callable[[Report], Section]] = {
    "choices": choices,
    "stability": stability,
    "quality": quality,
    "recall": recalled,
    "ablations": ablations,
    "profiling": profiling,
    "cost": cost,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of the report."""
    parser.add_argument("--prefix", type=int, default=512, help="tokens of the prompts; the rest is read one by one")
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.6, 0.7, 0.8, 0.9, 0.95, 0.98])
    parser.add_argument("--ablated", type=float, nargs="+", default=[0.8, 0.98], help="thresholds of the ablations")
    parser.add_argument("--recall", type=int, nargs="*", default=[300], metavar="DISTANCE", help="also ask for facts")
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), default=tuple(SECTIONS), help="some sections")


def run(options: argparse.Namespace) -> None:
    """Measure what is not on disk, and write `fastgen.md` with its figures.

    Raises:
        ValueError: a text or a setting does not fit.
    """
    from kvjax.model import load

    if not 1 < options.prefix < options.length - STEPS[-1]:
        raise ValueError(f"--prefix {options.prefix} is not from 2 to --length {options.length} less {STEPS[-1] + 1}.")
    model = load(options.model, dtype="float32")
    read = passages(model, options.text, options.rows, options.length)
    store = Store(
        options.out / "fastgen" / "measurements.json", options.redo, lambda line: print(line, file=sys.stderr)
    )
    runs = Runs(model, read, store, (), options.out, options.prefix)
    report = Report(runs, tuple(sorted(options.thresholds)), tuple(options.ablated), tuple(options.recall))
    sections = [SECTIONS[name](report) for name in options.only]
    claims = [claim for _, some, _ in sections for claim in some]
    counts = ", ".join(f"{sum(c.verdict == v for c in claims)} {v}" for v in dict.fromkeys(c.verdict for c in claims))
    texts = " ".join(Path(text).name for text in options.text)
    words = f"--model {options.model} --text {texts} --rows {options.rows} --length {options.length}"
    write_text(
        options.out / "fastgen.md",
        f"# FastGen on {model.name}\n\nMade by `python -m kvjax.evaluate fastgen {words} --prefix {options.prefix} "
        f"--out DIR`; figures and raw numbers are in `fastgen/`. {options.rows} passages of {options.length} tokens of "
        f"each text, in float32.\n\nOf {len(claims)} claims: {counts}. Verdicts are computed from the numbers, rules "
        "are in `kvjax/evaluate/reports/fastgen/`.\n"
        + "".join(f"\n## {title}\n\n{claims_table(some)}\n{body}" for title, some, body in sections),
    )
    print(options.out / "fastgen.md")
