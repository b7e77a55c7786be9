"""Claims with their verdicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

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


def claims_table(claims: Iterable[Claim]) -> str:
    """Return claims and their verdicts as a Markdown table."""
    rows = [[claim.what, f"**{claim.verdict}**", claim.numbers] for claim in claims]
    return markdown_table(["claim", "verdict", "numbers"], rows)
