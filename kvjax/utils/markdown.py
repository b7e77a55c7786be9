"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table, empty if there are no rows.

    Numbers are aligned right, floats have four places, and None is a dash.
    """
    rows = [list(row) for row in rows]
    if not rows:
        return ""
    numeric = [
        any(isinstance(row[i], (int, float)) for row in rows)
        and all(row[i] is None or isinstance(row[i], (int, float)) for row in rows)
        for i in range(len(headings))
    ]

    def cell(value: Any) -> str:
        if value is None:
            return "–"
        return f"{value:.4f}" if isinstance(value, float) else str(value).replace("|", "\\|")

    lines = [headings, ["---:" if right else "---" for right in numeric], *([cell(v) for v in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
