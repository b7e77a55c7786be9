"""Results of a grid: a line for each as it comes, and a table of all at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich import filesize
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]


class Measure(NamedTuple):
    """Field of a task's rows by which policies are compared."""

    key: str
    label: str
    relative: bool = False
    """True if its change against the full cache is a ratio."""


class Columns(NamedTuple):
    """Fields of a task's rows that tables and figures show."""

    printed: Measure
    """In the terminal."""
    figure: Measure
    """On pages and in figures."""
    also: tuple[str, ...] = ()
    """Further measures on pages."""
    of_cases: str | None = None
    """The measure in figures of each case, which is compared with the full cache case by case."""


WIDE = 1000
"""Width of the table in a file or pipe, in characters, so that no cell is folded."""
MOST_COLUMNS = 4
"""Maximum number of cases with a column each in the table at the end; for more, it shows their mean."""


def result_line(columns: Columns, row: Row, full: Row | None) -> str:
    """Format one row as a line of text.

    Args:
        full: the full cache's row of the same case; None if this is it.
    """
    name = f"{row['policy']} at {row['budget']:g}"
    if "refused" in row:
        return f"{name}: left out: {row['refused']}"
    measure = columns.printed
    shown = _with_change(measure, row.get(measure.key), None if full is None else full.get(measure.key))
    change = " against the full cache" if "(" in shown else ""
    cache, full_cache = row["cache_bytes"], row["full_cache_bytes"]
    size, full_size = filesize.decimal(cache), filesize.decimal(full_cache)
    return f"{name}: {measure.label} {shown}{change}; cache {size}, {cache / full_cache:.0%} of {full_size}"


def paired(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Return the mean of a - b over cases and its standard error; both have the same cases, in the same order."""
    difference = np.asarray(a) - np.asarray(b)
    spread = difference.std(ddof=1) / np.sqrt(len(difference)) if len(difference) > 1 else np.nan
    return float(difference.mean()), float(spread)


class Measured(NamedTuple):
    """Rows of a task, for each of its cases and each policy at a budget, the full cache first."""

    columns: Columns
    cases: Sequence[Row]
    rows: Sequence[Sequence[Row]]


def print_table(tasks: Iterable[Measured]) -> None:
    """Print a line for each policy and budget, with its numbers, their change against the full cache, and its bytes."""
    tasks = list(tasks)
    columns = [column for task in tasks for column in _columns(task)]
    shown = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
    shown.add_column("policy", no_wrap=True)
    for heading in ("budget", *(heading for heading, _ in columns), "bytes"):
        shown.add_column(heading, justify="right")
    for index, rows in enumerate(zip(*(of_case for task in tasks for of_case in task.rows), strict=True)):
        done = [row for row in rows if "refused" not in row]
        share = sum(row["cache_bytes"] for row in done) / sum(row["full_cache_bytes"] for row in done) if done else None
        numbers = [cells[index] for _, cells in columns]
        bytes_shown = "–" if share is None else f"{share:.0%}"
        shown.add_row(rows[0]["policy"], f"{rows[0]['budget']:g}", *numbers, bytes_shown)
    terminal = sys.stdout.isatty()
    Console(highlight=False, markup=False, width=None if terminal else WIDE).print(shown)


def _columns(task: Measured) -> list[tuple[str, list[str]]]:
    """Return the headings, and the cells below them."""
    measure, cases = task.columns.printed, task.cases
    numbers = [[row.get(measure.key) for row in of_case] for of_case in task.rows]
    headings = [measure.label] * len(cases)
    if all("refused" in row for of_case in task.rows for row in of_case):
        return []
    if len(cases) > MOST_COLUMNS:
        numbers = [[None if None in values else float(np.mean(values)) for values in zip(*numbers, strict=True)]]
        headings = [f"{measure.label}\nmean of {len(cases)}"]
    else:
        for name in cases[0]:
            if len({str(case[name]) for case in cases}) > 1:
                headings = [f"{heading}\n{name} {case[name]}" for heading, case in zip(headings, cases, strict=True)]
    return [
        (heading, [_with_change(measure, value, of_case[0] if i else None) for i, value in enumerate(of_case)])
        for heading, of_case in zip(headings, numbers, strict=True)
    ]


def _with_change(measure: Measure, value: float | None, before: float | None) -> str:
    if value is None:
        return "–"
    if before is None:
        return f"{value:.4g}"
    return f"{value:.4g} ({value / before - 1:+.1%})" if measure.relative else f"{value:.4g} ({value - before:+.3f})"
