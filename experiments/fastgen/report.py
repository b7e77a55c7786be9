"""FastGen's tokens and costs, with the paper's figures and tables: `kvjax evaluate fastgen`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from experiments.claims import SHOWS, Section, claims_table, verdicts
from experiments.fastgen.attention import STEPS, choices, stability
from experiments.fastgen.cost import cost, profiling
from experiments.fastgen.measurements import Report
from experiments.fastgen.quality import ablations, quality, recalled
from experiments.runs import Runs
from experiments.store import open_store
from kvjax.evaluation.texts import passages
from kvjax.methods.fastgen import PARTS
from kvjax.types import ROWS
from kvjax.utils.files import write_text

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
"""Values of `frequent_among`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of the report."""
    parser.add_argument("--prefix", type=int, default=512, help="tokens of the prompts; the rest is read one by one")
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.6, 0.7, 0.8, 0.9, 0.95, 0.98])
    parser.add_argument("--ablated", type=float, nargs="+", default=[0.8, 0.98], help="thresholds of the ablations")
    parser.add_argument("--recall", type=int, nargs="*", default=[300], metavar="DISTANCE", help="also ask for facts")
    parser.add_argument("--among", nargs="+", choices=tuple(READINGS), default=tuple(READINGS), help="some readings")
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), default=tuple(SECTIONS), help="some sections")


def run(options: argparse.Namespace) -> None:
    """Measure the missing values, and write `fastgen.md` with its figures.

    Raises:
        ValueError: a text or a setting does not fit.
    """
    from kvjax.model import load

    if not 1 < options.prefix < options.length - STEPS[-1]:
        raise ValueError(f"--prefix {options.prefix} is not from 2 to --length {options.length} less {STEPS[-1] + 1}.")
    model = load(options.model, "float32", options.revision, mesh=options.mesh)
    if "profiling" in options.only and model.mesh is not None and model.mesh.shape[ROWS] > 1:
        raise ValueError(
            f"profiling reads one prompt, whose row --mesh {options.mesh} cannot share; leave data out, or that "
            "section with --only."
        )
    read = passages(model, options.text, options.rows, options.length)
    store = open_store(options, "fastgen")
    runs = Runs(model, read, store, (), options.out, options.prefix)
    report = Report(runs, tuple(sorted(options.thresholds)), tuple(options.ablated), tuple(options.recall))
    reports = {among: dataclasses.replace(report, among=among) for among in options.among}
    sections = {name: [SECTIONS[name](one) for one in reports.values()] for name in options.only}
    texts = " ".join(Path(text).name for text in options.text)
    words = f"--model {options.model} --text {texts} --rows {options.rows} --length {options.length}"
    words += f" --prefix {options.prefix} --out DIR"
    for name, all_of_them in (("among", READINGS), ("only", SECTIONS)):
        some = getattr(options, name)
        words += "" if tuple(some) == tuple(all_of_them) else f" --{name} {' '.join(some)}"
    lines = [
        f"# FastGen on {model.name}\n\n{_opening(reports[options.among[0]], list(sections.values()))}\n\n"
        f"Made by `kvjax evaluate fastgen {words}`; figures and raw numbers are in `fastgen/`. "
        f"{options.rows} passages of {options.length} tokens of each text, in float32.\n\n"
    ]
    for index, among in enumerate(reports):
        claims = [claim for made in sections.values() for claim in made[index].claims]
        lines.append(f"- {READINGS[among]} (`frequent_among={among!r}`): of {len(claims)} claims {verdicts(claims)}.\n")
    lines.append("\nVerdicts are computed from the numbers, rules are in `experiments/fastgen/`.\n")
    for made in sections.values():
        lines.append(f"\n## {made[0].title}\n")
        for among, section in zip(reports, made, strict=True):
            lines.append(f"\n### {READINGS[among]}\n\n{claims_table(section.claims)}\n{section.body}")
    write_text(options.out / "fastgen.md", "".join(lines))
    print(options.out / "fastgen.md")


def _opening(report: Report, sections: list[list[Section]]) -> str:
    """Explain the results in relation to the paper, as far as the numbers allow."""
    claims = [claim for made in sections for section in made for claim in section.claims]
    shown, threshold = sum(claim.verdict == SHOWS for claim in claims), 0.95
    runs, profile, slots = report.runs, report.profile(threshold, report.runs.prefix), report.slots_set_aside(threshold)
    recovered, chosen = np.asarray(profile["recovered"]), np.asarray(profile["choice"])
    special, marked, frequent = recovered.mean((0, 1, 2))[:3]
    counts = np.stack([(chosen == i).mean((1, 2)) for i in range(len(PARTS) + 1)])
    share, held = slots["share"][len(PARTS) - 1], slots["held"][len(PARTS) - 1]
    config, length = runs.model.config, runs.passages.tokens.shape[1]
    layers, heads, width = config.layers, config.kv_heads, config.head_width
    most, alike = recovered.mean(1)[..., 0].max(), int((counts.max(0) >= 0.9).sum())
    said = [
        f"{shown} of {len(claims)} claims show. The paper's models have 7 to 65 billion parameters, this one has "
        f"{layers} layers of {heads} KV heads. Special tokens get {special:.0%} of their attention in the mean over "
        f"heads and prompts and nowhere more than {most:.0%}; with punctuation it is {marked:.0%}, with frequent "
        f"tokens {frequent:.0%}. At T = {threshold} {(chosen < 2).mean():.0%} of the heads are content with the first "
        f"two parts, and in {alike} of {layers} layers nine heads in ten choose the same.",
    ]
    if share is not None:
        said.append(
            f"Heads that choose all four parts keep {held * length / runs.prefix:.0%} of a prompt, but their shares of "
            f"the length grow with it: they set aside slots for {share:.0%} of a text of {length} tokens."
        )
    said.append(
        f"Pages hold {slots['pool'] - 1:.1%} more slots than heads call for, and a slot's position, score and class "
        f"take 9 bytes beside the {8 * width} of its pair: full caches have no such overhead, fixed policies less."
    )
    return " ".join(said)
