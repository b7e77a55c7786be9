"""Write the rows of any runs on one page, as Markdown and as self-contained HTML: `kvjax evaluate report`."""

from __future__ import annotations

import argparse
import base64
import functools
import html
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvjax.evaluation.figures import (
    Point,
    legend_beside,
    new_figure,
    plot_lines,
    plot_quality,
    save_figure,
    whole_ticks,
)
from kvjax.evaluation.grid import RowFile
from kvjax.evaluation.summary import paired
from kvjax.evaluation.tasks import TASKS
from kvjax.utils.files import file_name, output_directory, read_text, write_text
from kvjax.utils.markdown import markdown_table

Row = dict[str, Any]

PEAK = "peak_temporary_bytes"
SPEED = ("prefill_seconds", "decode_tokens_per_second")


class Section(NamedTuple):
    """A part of the page."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Any]]
    figures: Sequence[Path]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the report."""
    add = parser.add_argument
    add("--runs", type=Path, nargs="+", required=True, metavar="DIR", help="directories with results")
    add("--out", type=output_directory, default="results", help="directory for NAME.md, NAME.html and figures")
    add("--name", type=file_name, default="report", help="name of the report (default: report)")
    add("--title", default="Measurements", help="title of the report")
    add("--notes", type=Path, metavar="FILE", help="Markdown to insert before the tables")


def run(options: argparse.Namespace) -> None:
    """Write the page."""
    notes = "" if options.notes is None else read_text(options.notes)
    rows_by_task: dict[str, list[Row]] = {task: [] for task in TASKS}
    directories: list[Path] = options.runs
    for task, directory in itertools.product(TASKS, directories):
        rows_by_task[task] += [row for row in RowFile(directory / f"{task}.jsonl").rows if "refused" not in row]
    if not any(rows_by_task.values()):
        where = ", ".join(map(str, options.runs))
        raise ValueError(f"{where}: there are no rows; make some with kvjax evaluate {'|'.join(TASKS)}.")
    figures = options.out / options.name
    sections = [
        _section(task, subject, rows, figures)
        for task, all_rows in rows_by_task.items()
        for subject, rows in _groups(all_rows, TASKS[task].subject)
    ]
    sections += _needles(rows_by_task["retrieval"], figures)
    file = options.out / f"{options.name}.md"
    write_text(file, markdown(sections, options.out, options.title, options.command, notes))
    write_text(file.with_suffix(".html"), page(sections, options.title, options.command, notes))
    print(file, file.with_suffix(".html"), sep="\n")


def _groups(rows: Iterable[Row], names: Sequence[str]) -> list[tuple[tuple[Any, ...], list[Row]]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return list(groups.items())


def _section(task: str, subject: tuple[Any, ...], rows: list[Row], directory: Path) -> Section:
    _, (measure, label, _), also, of_cases = TASKS[task].columns_of(rows)
    caption, name = _names(TASKS[task].subject, subject)
    lines, points, full = [], list[Point](), None
    full_cases = _cases(of_cases, [row for row in rows if row["policy"] == "full"])
    for (policy, budget), of_choice in _groups(rows, ("policy", "budget")):
        mean = functools.partial(_mean, of_choice)
        share = sum(row["cache_bytes"] for row in of_choice) / sum(row["full_cache_bytes"] for row in of_choice)
        quality = mean(measure)
        if quality is None:
            continue
        cases = _cases(of_cases, of_choice)
        common = [(value, full_cases[case]) for case, value in cases.items() if case in full_cases]
        difference, error = paired(*zip(*common, strict=True)) if common and policy != "full" else (None, None)
        beside = [difference, None if error is None or np.isnan(error) else error] if of_cases else []
        peaks = [row[PEAK] for row in of_choice if row.get(PEAK) is not None]
        cells = [*map(mean, also), max(peaks, default=None), *map(mean, SPEED)]
        cases_of_all = sum(row["cases"] for row in of_choice)
        lines.append([policy, f"{budget:g}", f"{share:.1%}", cases_of_all, quality, *beside, *cells])
        if policy == "full":
            full = quality
        else:  # if policies choose their bytes, settings make the curve
            points.append(Point(policy if budget != 1 else policy.partition("[")[0], share, quality))
    headings = ["policy", "budget", "bytes / full", "cases", label]
    headings += ["less the full cache's", "standard error of that"] if of_cases else []
    headings += [name.replace("_", " ") for name in (*also, PEAK, *SPEED)]
    figures = []
    if points:
        figure, (axes,) = new_figure(width=7.0, height=4.5)
        plot_quality(axes, points, full, label, near=task == "perplexity")
        axes.set_title(caption, fontsize=8)
        figures.append(directory / f"{task}_{name}.png")
        save_figure(figure, figures[0])
    figures += _curves(rows, directory / f"{task}_{name}_layers.png")
    return Section(f"{task}: {caption}", headings, lines, figures)


def _mean(rows: list[Row], name: str) -> float | None:
    """Return the mean of a field over the cases of some rows; None if no row has it."""
    pairs = [(row[name], row["cases"]) for row in rows if row.get(name) is not None]
    return sum(value * cases for value, cases in pairs) / sum(cases for _, cases in pairs) if pairs else None


def _names(fields: Sequence[str], subject: Sequence[Any]) -> tuple[str, str]:
    """Return the values of a group's fields, as a text and as a part of a file's name."""
    values = {name: value for name, value in zip(fields, subject, strict=True) if value not in (None, False)}
    caption = ", ".join(f"{name} {value}" for name, value in values.items())
    return caption, "_".join(str(value).replace("/", "-") for value in values.values())


def _cases(name: str | None, rows: Iterable[Row]) -> dict[tuple[Any, ...], float]:
    """Return the measure of each case by the fields that identify it."""
    return {
        (row.get("family"), row.get("depth"), row.get("passages"), row.get("seed"), index): value
        for row in rows
        for index, value in enumerate(row.get(name, ()) if name else ())
    }


def _curves(rows: list[Row], file: Path) -> list[Path]:
    """Draw the measures of each layer, if rows have them."""
    names = [name for name in rows[0] if name.endswith("_of_layers")]
    if not names:
        return []
    figure, axes = new_figure(len(names), width=6.0)
    for axis, name in zip(axes, names, strict=True):
        lines = {f"{row['policy']}, {row['budget']:g}": row[name] for row in rows if row["policy"] != "full"}
        plot_lines(axis, {label: (range(len(values)), values) for label, values in lines.items()})
        whole_ticks(axis.xaxis)
        axis.set(xlabel="layer", ylabel=name.removesuffix("_of_layers").replace("_", " "))
        legend_beside(axis)
    save_figure(figure, file)
    return [file]


def _needles(rows: list[Row], directory: Path) -> list[Section]:
    """Draw string match of needles over families, lengths and depths, a map for each policy and budget."""
    sections = []
    for subject, needles in _groups((row for row in rows if row.get("depth") is not None), _NEEDLES):
        depths = sorted({row["depth"] for row in needles})
        places = sorted({(row["family"], row["length"]) for row in needles})
        if len(depths) < 2:
            continue
        maps = _groups(needles, ("policy", "budget"))
        figure, axes = new_figure(len(maps), width=2.6, height=1.0 + 0.35 * len(places))
        for axis, ((policy, budget), of_choice) in zip(axes, maps, strict=True):
            shown = np.full((len(places), len(depths)), np.nan)
            for row in of_choice:
                shown[places.index((row["family"], row["length"])), depths.index(row["depth"])] = row["string_match"]
            image = axis.imshow(shown, vmin=0, vmax=1, cmap="viridis", aspect="auto")
            axis.set_title(f"{policy}, {budget:g}", fontsize=8)
            axis.set_xticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=7)
            names = [f"{family}, {length}" for family, length in places]
            axis.set_yticks(range(len(places)), names if axis is axes[0] else [""] * len(places), fontsize=7)
            axis.set_xlabel("depth", fontsize=7)
            if axis is axes[-1]:
                figure.colorbar(image, ax=axis, label="string match")
        caption, name = _names(_NEEDLES, subject)
        file = directory / f"needles_{name}.png"
        save_figure(figure, file)
        sections.append(Section(f"needles over lengths and depths: {caption}", [], [], [file]))
    return sections


_NEEDLES = ("model", "dtype", "chat", "query_aware")


def markdown(sections: Sequence[Section], directory: Path, title: str, command: str, notes: str = "") -> str:
    """Return the page as Markdown, with figures beside it."""
    parts = [f"# {title}\n\nMade by `{command}`.\n", *([notes.strip() + "\n"] if notes else [])]
    for section in sections:
        parts += [f"## {section.title}\n", markdown_table(section.headings, section.rows)]
        parts += [f"![{section.title}]({file.relative_to(directory)})\n" for file in section.figures]
    return "\n".join(parts)


def page(sections: Sequence[Section], title: str, command: str, notes: str = "") -> str:
    """Return the page as HTML, with embedded figures."""

    def row(cells: Iterable[Any], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(_shown(cell))}</{tag}>" for cell in cells) + "</tr>"

    parts = [f"<h1>{html.escape(title)}</h1><p>Made by <code>{html.escape(command)}</code>.</p>"]
    parts += [f"<p>{html.escape(paragraph)}</p>" for paragraph in notes.split("\n\n") if paragraph.strip()]
    for section in sections:
        body = "\n".join([row(section.headings, "th"), *(row(line, "td") for line in section.rows)])
        shown = f"\n<table>\n{body}\n</table>" if section.rows else ""
        parts.append(f"<h2>{html.escape(section.title)}</h2>{shown}")
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
