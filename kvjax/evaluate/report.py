"""What every report is made of: measurements kept on disk, claims, Markdown tables, figures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.files import written_aside

SHOWS, NOT, UNKNOWN = "shows", "does not show", "not measured"


class Store:
    """Measurements by name in one JSON file; one that was made with the same settings is not made again.

    Args:
        file: where they are; made with the first measurement.
        redo: measure again whatever is asked for.
        show: called with a line for each measurement.

    Raises:
        ValueError: the file is there and holds something else.
    """

    def __init__(self, file: Path, redo: bool = False, show: Callable[[str], None] = lambda line: None) -> None:
        self.file, self.redo, self.show = file, redo, show
        self._fresh: set[str] = set()
        self._kept: dict[str, Any] = {}
        if file.exists():
            try:
                self._kept = json.loads(file.read_text(encoding="utf-8"))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{file} is no file of measurements ({error}); delete it or name another.") from None

    def stored(self, name: str, settings: dict[str, Any]) -> Any | None:
        """A measurement made with these settings, or None."""
        kept = self._kept.get(name)
        return kept["result"] if kept and kept["settings"] == _plain(settings) else None

    def measure(self, name: str, settings: dict[str, Any], make: Callable[[], Any]) -> Any:
        """A measurement, made now unless it is there.

        Args:
            name: what it is called in the file.
            settings: everything that it depends on, fit for JSON.
            make: returns it, fit for JSON.
        """
        found = self.stored(name, settings)
        if found is not None and not (self.redo and name not in self._fresh):
            return found
        self.show(name)
        self._kept[name] = {"settings": _plain(settings), "result": _plain(make())}
        self._fresh.add(name)
        write(self.file, json.dumps(dict(sorted(self._kept.items())), indent=1) + "\n")
        return self._kept[name]["result"]


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


@dataclasses.dataclass(frozen=True)
class Claim:
    """One thing that should show, and whether the numbers show it.

    Args:
        what: the claim for one case, in words.
        shown: whether the numbers say so; None if they were not measured.
        numbers: those that decide.
    """

    what: str
    shown: bool | None
    numbers: str = ""

    @property
    def verdict(self) -> str:
        return UNKNOWN if self.shown is None else SHOWS if self.shown else NOT


def claims_table(claims: Iterable[Claim]) -> str:
    """Claims with their verdicts as a Markdown table."""
    rows = [[claim.what, f"**{claim.verdict}**", claim.numbers] for claim in claims]
    return table(["claim", "verdict", "numbers"], rows)


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; numbers to the right, floats to four places, None as a dash; nothing if there are no rows."""
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


def paired(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Mean of a - b over rows, and its standard error: both read the same texts, so that differences count."""
    difference = np.asarray(a) - np.asarray(b)
    spread = difference.std(ddof=1) / np.sqrt(len(difference)) if len(difference) > 1 else np.nan
    return float(difference.mean()), float(spread)


def write(file: Path, content: str) -> None:
    """A text file, written aside and then renamed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(file) as aside:
        aside.write_text(content, encoding="utf-8")


def new_figure(columns: int = 1, width: float = 5.0, height: float = 3.6) -> tuple[Any, list[Any]]:
    """A matplotlib figure with axes side by side.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("figures need matplotlib; install it with: pip install 'kvjax[plots]'.") from None
    figure = Figure(figsize=(width * columns, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def save_figure(figure: Any, file: Path) -> None:
    """A PNG, written aside and then renamed; the same numbers give the same bytes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(file) as aside:
        figure.savefig(aside, format="png", dpi=110, metadata={"Software": None})


@dataclasses.dataclass(frozen=True)
class Point:
    """One policy at one budget.

    Args:
        label: the policy's; points of one label are joined by a line.
        cost: bytes of the cache over those of a full one, or slots.
        quality: nats, or whatever the figure is about.
    """

    label: str
    cost: float
    quality: float


def plot_quality(
    axes: Any, points: Sequence[Point], full: float | None, ylabel: str, xlabel: str = "cache bytes / full cache bytes"
) -> None:
    """Quality against cost, one line for each label.

    Args:
        axes: of matplotlib.
        points: in any order.
        full: quality of the full cache, a horizontal line.
        ylabel: what quality is.
        xlabel: what cost is.
    """
    for label in dict.fromkeys(point.label for point in points):
        line = sorted((p.cost, p.quality) for p in points if p.label == label)
        axes.plot(*zip(*line, strict=True), marker="o", markersize=3, linewidth=1, label=label)
    if full is not None:
        axes.axhline(full, color="black", linewidth=1, linestyle=":", label="full")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.legend(fontsize=7)
