"""What FastGen keeps, and what it costs: `python -m kvjax.evaluate fastgen`, the figures and tables of the paper."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvjax.evaluate.reports.claims import SHOWS, claims_table
from kvjax.evaluate.reports.fastgen.attention import STEPS, choices, stability
from kvjax.evaluate.reports.fastgen.cost import cost, profiling
from kvjax.evaluate.reports.fastgen.measurements import Report, Section
from kvjax.evaluate.reports.fastgen.quality import ablations, quality, recalled
from kvjax.evaluate.runs import Runs
from kvjax.evaluate.store import Store
from kvjax.evaluate.texts import passages
from kvjax.files import write_text
from kvjax.policies.fastgen import PARTS

SECTIONS: dict[str, Callable[[Report], Section]] = {
    "choices": choices,
    "stability": stability,
    "quality": quality,
    "recall": recalled,
    "ablations": ablations,
    "profiling": profiling,
    "cost": cost,
}

READINGS = {
    "all": "Frequent among all tokens, the paper's union",
    "others": "Frequent among the others",
}
"""What `frequent_among` may be."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of the report."""
    parser.add_argument("--prefix", type=int, default=512, help="tokens of the prompts; the rest is read one by one")
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.6, 0.7, 0.8, 0.9, 0.95, 0.98])
    parser.add_argument("--ablated", type=float, nargs="+", default=[0.8, 0.98], help="thresholds of the ablations")
    parser.add_argument("--recall", type=int, nargs="*", default=[300], metavar="DISTANCE", help="also ask for facts")
    parser.add_argument("--among", nargs="+", choices=tuple(READINGS), default=tuple(READINGS), help="some readings")
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
    reports = {among: dataclasses.replace(report, among=among) for among in options.among}
    sections = {name: [SECTIONS[name](one) for one in reports.values()] for name in options.only}
    texts = " ".join(Path(text).name for text in options.text)
    words = f"--model {options.model} --text {texts} --rows {options.rows} --length {options.length}"
    lines = [
        f"# FastGen on {model.name}\n\n{_opening(reports[options.among[0]], list(sections.values()))}\n\n"
        f"Made by `python -m kvjax.evaluate fastgen {words} --prefix {options.prefix} --out DIR`; figures and raw numbers "
        f"are in `fastgen/`. {options.rows} passages of {options.length} tokens of each text, in float32.\n\n"
    ]
    for index, among in enumerate(reports):
        claims = [claim for made in sections.values() for claim in made[index][1]]
        counts = (f"{sum(c.verdict == v for c in claims)} {v}" for v in dict.fromkeys(c.verdict for c in claims))
        lines.append(
            f"- {READINGS[among]} (`frequent_among={among!r}`): of {len(claims)} claims {', '.join(counts)}.\n"
        )
    lines.append("\nVerdicts are computed from the numbers, rules are in `kvjax/evaluate/reports/fastgen/`.\n")
    for made in sections.values():
        lines.append(f"\n## {made[0][0]}\n")
        for among, (_, claims, body) in zip(reports, made, strict=True):
            lines.append(f"\n### {READINGS[among]}\n\n{claims_table(claims)}\n{body}")
    write_text(options.out / "fastgen.md", "".join(lines))
    print(options.out / "fastgen.md")


def _opening(report: Report, sections: list[list[Section]]) -> str:
    """Why so much or so little of the paper shows, as far as the numbers tell."""
    claims = [claim for made in sections for _, some, _ in made for claim in some]
    shown = sum(claim.verdict == SHOWS for claim in claims) / max(1, len(claims))
    runs, threshold = report.runs, 0.95
    profile = report.profile(threshold, runs.prefix)
    recovered = np.asarray(profile["recovered"]).mean((0, 1, 2))
    narrow = (np.asarray(profile["choice"]) < 2).mean()
    slots = report.slots_set_aside(threshold)
    widest, left = slots["share"][len(PARTS) - 1], slots["held"][len(PARTS) - 1]
    width, length = runs.model.config.head_width, runs.passages.tokens.shape[1]
    said = [
        f"{shown:.0%} of the claims show. The model has {runs.model.config.layers} layers of "
        f"{runs.model.config.kv_heads} KV heads, {width} wide, and texts have {length} tokens; the paper's have 7 to 65 "
        f"billion parameters. In the mean over heads and prompts, special tokens recover {recovered[0]:.0%} of the "
        f"attention here, {recovered[1]:.0%} with punctuation and {recovered[2]:.0%} with frequent tokens, and at "
        f"T = {threshold} {narrow:.0%} of the heads are content with one of the first two: few heads have a use of their "
        "own, and choices differ by layer more than by head."
    ]
    if widest is not None:
        said.append(
            f"Heads that choose all four parts keep {left * length / runs.prefix:.0%} of a prompt and set aside slots "
            f"for {widest:.0%} of the text, which leaves little to save."
        )
    slot = 2 * width * 4
    said.append(
        f"Pages hold {slots['pool']:.2f} times the slots that heads call for, and a slot's position, score and class are "
        f"9 bytes beside {slot} of its pair: with heads this narrow and texts this short both weigh more than in a large "
        "model."
    )
    return " ".join(said)
