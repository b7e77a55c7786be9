"""`kvjax evaluate report`: the rows of any runs on one page, as Markdown and as HTML that needs no other file."""

from __future__ import annotations

import argparse
import base64
import dataclasses
import html
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.evaluate.grid import Rows
from kvjax.evaluate.reports.claims import table
from kvjax.evaluate.reports.figures import Point, new_figure, plot_quality, save_figure
from kvjax.files import write_text

Row = dict[str, Any]

MEASURES = {
    "perplexity": ("nats_per_token", "nats per token"),
    "fidelity": ("divergence", "divergence from the full cache, nats"),
    "retrieval": ("string_match", "string match"),
    "generation": ("f1", "F1"),
}
"""What a figure shows of each task's rows."""
ALSO = {
    "perplexity": ("perplexity", "standard_error", "nats_per_word", "nats_per_byte"),
    "fidelity": (
        "divergence_standard_error",
        "agreement",
        "attention_kept",
        "hellinger",
        "attention_loss_ratio",
        "score_correlation",
    ),
    "retrieval": ("string_match_standard_error",),
    "generation": ("exact_match", "rouge-1", "rouge-2", "rouge-l"),
}
"""What a table shows besides."""
SPEED = ("peak_temporary_bytes", "prefill_seconds", "decode_tokens_per_second")
SUBJECTS = {
    "perplexity": ("model", "dtype", "text", "length", "prefix", "masked"),
    "fidelity": ("model", "dtype", "text", "length", "prefix"),
    "retrieval": ("model", "dtype", "chat", "query_aware", "length"),
    "generation": ("model", "dtype", "file", "chat", "query_aware"),
}
"""Rows that differ in any of these are not compared: each such group has a section."""


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the page.

    Args:
        title: its heading.
        headings: of the table's columns.
        rows: of the table.
        figures: PNG files.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Any]]
    figures: Sequence[Path]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of the page."""
    parser.add_argument("--runs", type=Path, nargs="+", required=True, metavar="DIR", help="directories of rows")
    parser.add_argument("--out", type=Path, default=Path("results"), help="directory of report.md and report.html")


def run(options: argparse.Namespace) -> None:
    """Write the page.

    Raises:
        ValueError: there are no rows.
    """
    found: dict[str, list[Row]] = {}
    directories: list[Path] = options.runs
    for task, directory in itertools.product(MEASURES, directories):
        rows = [row for row in Rows(directory / f"{task}.jsonl").rows if "refused" not in row]
        found.setdefault(task, []).extend(rows)
    if not any(found.values()):
        where = ", ".join(map(str, options.runs))
        raise ValueError(f"{where}: there are no rows; make some with kvjax evaluate {'|'.join(MEASURES)}.")
    sections = [
        _section(task, subject, rows, options.out / "report")
        for task, all_rows in found.items()
        for subject, rows in _groups(all_rows, SUBJECTS[task])
    ]
    write_text(options.out / "report.md", markdown(sections, options.out, options.command))
    write_text(options.out / "report.html", page(sections, options.command))
    print(options.out / "report.md", options.out / "report.html", sep="\n")


def _groups(rows: Iterable[Row], names: Sequence[str]) -> list[tuple[tuple[Any, ...], list[Row]]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return list(found.items())


def _section(task: str, subject: tuple[Any, ...], rows: list[Row], directory: Path) -> Section:
    measure, label = MEASURES[task]
    said = ", ".join(f"{n} {v}" for n, v in zip(SUBJECTS[task], subject, strict=True) if v not in (None, False))
    lines, points, full = [], list[Point](), None
    for (policy, budget), of_choice in _groups(rows, ("policy", "budget")):
        weights = [row["cases"] for row in of_choice]

        def mean(name: str, of_choice: list[Row] = of_choice, weights: list[int] = weights) -> float | None:
            known = [(row[name], n) for row, n in zip(of_choice, weights, strict=True) if row.get(name) is not None]
            return sum(value * n for value, n in known) / sum(n for _, n in known) if known else None

        share = sum(row["cache_bytes"] for row in of_choice) / sum(row["full_cache_bytes"] for row in of_choice)
        quality = mean(measure)
        assert quality is not None
        # Errors of cells do not average.
        rest = [None if "error" in name and len(of_choice) > 1 else mean(name) for name in (*ALSO[task], *SPEED)]
        lines.append([policy, f"{budget:g}", f"{share:.1%}", sum(weights), quality, *rest])
        if policy == "full":
            full = quality
        else:
            points.append(Point(policy, share, quality))
    headings = ["policy", "budget", "bytes / full", "cases", label]
    headings += [name.replace("_", " ") for name in (*ALSO[task], *SPEED)]
    name = "_".join([task, *(str(value).replace("/", "-") for value in subject if value not in (None, False))])
    figures = []
    if points:
        figure, (axes,) = new_figure(width=7.0)
        plot_quality(axes, points, full, label)
        axes.set_title(said, fontsize=8)
        save_figure(figure, directory / f"{name}.png")
        figures.append(directory / f"{name}.png")
    return Section(f"{task}: {said}", headings, lines, figures + _heat_maps(rows, directory / f"{name}_needles.png"))


def _heat_maps(rows: list[Row], file: Path) -> list[Path]:
    """String match of needles over families and depths, a map for each policy and budget."""
    needles = [row for row in rows if row.get("depth") is not None]
    depths = sorted({row["depth"] for row in needles})
    if len(depths) < 2:
        return []
    maps = _groups(needles, ("policy", "budget"))
    families = list(dict.fromkeys(row["family"] for row in needles))
    figure, axes = new_figure(len(maps), width=2.6, height=2.8)
    for axis, ((policy, budget), of_choice) in zip(axes, maps, strict=True):
        shown = np.full((len(families), len(depths)), np.nan)
        for row in of_choice:
            shown[families.index(row["family"]), depths.index(row["depth"])] = row["string_match"]
        image = axis.imshow(shown, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axis.set_title(f"{policy}, {budget:g}", fontsize=8)
        axis.set_xticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=7)
        axis.set_yticks(range(len(families)), families if axis is axes[0] else [""] * len(families), fontsize=7)
        axis.set_xlabel("depth", fontsize=7)
        if axis is axes[-1]:
            figure.colorbar(image, ax=axis, label="string match")
    save_figure(figure, file)
    return [file]


def markdown(sections: Sequence[Section], directory: Path, command: str) -> str:
    """The page as Markdown, with figures beside it."""
    parts = [f"# Measurements\n\nMade by `{command}`.\n"]
    for section in sections:
        parts += [f"## {section.title}\n", table(section.headings, section.rows)]
        parts += [f"![{section.title}]({file.relative_to(directory)})\n" for file in section.figures]
    return "\n".join(parts)


def page(sections: Sequence[Section], command: str) -> str:
    """The page as HTML, with figures in it."""

    def row(cells: Iterable[Any], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(_shown(cell))}</{tag}>" for cell in cells) + "</tr>"

    parts = [f"<h1>Measurements</h1><p>Made by <code>{html.escape(command)}</code>.</p>"]
    for section in sections:
        body = "\n".join([row(section.headings, "th"), *(row(line, "td") for line in section.rows)])
        parts.append(f"<h2>{html.escape(section.title)}</h2>\n<table>\n{body}\n</table>")
        for file in section.figures:
            content = base64.b64encode(file.read_bytes()).decode()
            parts.append(f'<img alt="{html.escape(section.title)}" src="data:image/png;base64,{content}">')
    return _PAGE.format(body="\n".join(parts))


def _shown(cell: Any) -> str:
    return "–" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>kvjax: measurements</title>
<style>body{{font:15px sans-serif;margin:2em;max-width:75em}} table{{border-collapse:collapse;font-size:13px}}
th,td{{padding:.2em .7em;border-bottom:1px solid #ddd;text-align:right}}
th:first-child,td:first-child{{text-align:left}}
img{{max-width:100%}}</style></head>
<body>
{body}
</body></html>
"""
