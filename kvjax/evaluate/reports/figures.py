"""Figures, above all of quality against cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax.files import written_aside


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
