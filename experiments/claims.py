"""Claims with their verdicts."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from kvjax.utils.markdown import markdown_table

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


@dataclasses.dataclass(frozen=True)
class Section:
    """One section of a report.

    Args:
        title: heading of the section.
        claims: claims to test.
        body: tables and figures, Markdown.
    """

    title: str
    claims: list[Claim]
    body: str


def verdicts(claims: Sequence[Claim]) -> str:
    """Return how many claims have each verdict."""
    counts = collections.Counter(claim.verdict for claim in claims)
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def claims_table(claims: Iterable[Claim]) -> str:
    """Return claims and their verdicts as a Markdown table."""
    rows = [[claim.what, f"**{claim.verdict}**", claim.numbers] for claim in claims]
    return markdown_table(["claim", "verdict", "numbers"], rows)
