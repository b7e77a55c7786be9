"""Claims with their verdicts, and Markdown tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

SHOWS, NOT, UNKNOWN = "shows", "does not show", "not measured"


@dataclasses.dataclass(frozen=True)
class Claim:
    """An expected result, and whether the numbers show it.

    Args:
        what: the claim for one case, in words.
        shown: True if the numbers show it; None if they were not measured.
        numbers: the numbers that decide.
    """

    what: str
    shown: bool | None
    numbers: str = ""

    @property
    def verdict(self) -> str:
        return UNKNOWN if self.shown is None else SHOWS if self.shown else NOT


def claims_table(claims: Iterable[Claim]) -> str:
    """Return claims and their verdicts as a Markdown table."""
    rows = [[claim.what, f"**{claim.verdict}**", claim.numbers] for claim in claims]
    return markdown_table(["claim", "verdict", "numbers"], rows)


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
