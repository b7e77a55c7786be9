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
    drawn: Measure
    """On pages and in figures."""
    also: tuple[str, ...] = ()
    """Further measures on pages."""
    of_cases: str | None = None
    """The drawn measure of each case, which is compared with the full cache case by case."""


WIDE = 1000
"""Width of the table in a file or pipe, in characters, so that no cell is folded."""
MOST_COLUMNS = 4
"""Maximum number of cases with a column each in the table at the end; for more, it shows their mean."""


def result_line(columns: Columns, row: Row, full: Row | None) -> str:
    """Format one row as a line of text.

    Args:
        full: the full cache's row of the same case; None if there is none.
    """
    name = f"{row['policy']} at {row['budget']:g}"
    if "refused" in row:
        return f"{name}: left out: {row['refused']}"
    measure = columns.printed
    shown = _with_change(measure, row, full)
    change = " against the full cache" if "(" in shown else ""
    kept, whole = row["cache_bytes"], row["full_cache_bytes"]
    size, full_size = filesize.decimal(kept), filesize.decimal(whole)
    return f"{name}: {measure.label} {shown}{change}; cache {size}, {kept / whole:.0%} of {full_size}"


def paired(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Return the mean of a - b over cases and its standard error; both have the same cases, in the same order."""
    difference = np.asarray(a) - np.asarray(b)
    spread = difference.std(ddof=1) / np.sqrt(len(difference)) if len(difference) > 1 else np.nan
    return float(difference.mean()), float(spread)


class Measured(NamedTuple):
    """Rows of a task, with its cases in the order of their columns."""

    columns: Columns
    cases: Sequence[Row]
    rows: Sequence[Row]


def print_table(tasks: Iterable[Measured]) -> None:
    """Print a line for each policy and budget, with its numbers, their change against the full cache, and its bytes."""
    tasks = list(tasks)
    shown = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
    shown.add_column("policy", no_wrap=True)
    shown.add_column("budget", justify="right")
    columns = [column for task in tasks for column in _columns(task)]
    for heading, _ in columns:
        shown.add_column(heading, justify="right")
    shown.add_column("bytes", justify="right")
    everything = [row for task in tasks for row in task.rows]
    for policy, budget in dict.fromkeys((row["policy"], row["budget"]) for row in everything):
        mine = [
            row for row in everything if (row["policy"], row["budget"]) == (policy, budget) and "refused" not in row
        ]
        share = sum(row["cache_bytes"] for row in mine) / sum(row["full_cache_bytes"] for row in mine) if mine else None
        numbers = [of.get((policy, budget), "–") for _, of in columns]
        shown.add_row(policy, f"{budget:g}", *numbers, "–" if share is None else f"{share:.0%}")
    terminal = sys.stdout.isatty()
    Console(highlight=False, markup=False, width=None if terminal else WIDE).print(shown)


def _columns(task: Measured) -> list[tuple[str, dict[tuple[str, float], str]]]:
    """Return the headings, and the cells below them for each policy and budget."""
    (measure, *_), cases, rows = task
    if all("refused" in row for row in rows):
        return []
    if len(cases) > MOST_COLUMNS:
        return [(f"{measure.label}\nmean of {len(cases)}", _of_entries(measure, rows, len(cases)))]
    differ = [name for name in cases[0] if len({str(case.get(name)) for case in cases}) > 1]
    columns: list[tuple[str, dict[tuple[str, float], str]]] = []
    for case in cases:
        of_case = [row for row in rows if all(row.get(name) == value for name, value in case.items())]
        heading = "\n".join([measure.label, *(f"{name} {case[name]}" for name in differ)])
        columns.append((heading, _of_entries(measure, of_case, 1)))
    return columns


def _of_entries(measure: Measure, rows: Iterable[Row], cases: int) -> dict[tuple[str, float], str]:
    """Return the mean over `cases` cases, for policies and budgets that have all of them."""
    values: dict[tuple[str, float], list[float]] = {}
    for row in rows:
        if row.get(measure.key) is not None:
            values.setdefault((row["policy"], row["budget"]), []).append(row[measure.key])
    means = {entry: {measure.key: float(np.mean(found))} for entry, found in values.items() if len(found) == cases}
    full = next((mean for (policy, _), mean in means.items() if policy == "full"), None)
    return {entry: _with_change(measure, mean, full if entry[0] != "full" else None) for entry, mean in means.items()}


def _with_change(measure: Measure, row: Row, full: Row | None) -> str:
    value = row.get(measure.key)
    before = None if full is None or full is row else full.get(measure.key)
    if value is None:
        return "–"
    if before is None:
        return f"{value:.4g}"
    return f"{value:.4g} ({value / before - 1:+.1%})" if measure.relative else f"{value:.4g} ({value - before:+.3f})"
