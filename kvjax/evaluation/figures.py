"""Figures, mostly of quality against cost."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.utils.files import check_writable, written_aside


def check_matplotlib() -> None:
    """Refuse to draw without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError('drawing needs matplotlib: pip install matplotlib, or in a clone pip install -e ".[plots]".')


def check_figure(file: Path) -> None:
    """Refuse a PNG file that could not be drawn, before its content is computed."""
    check_writable(file, ".png")
    check_matplotlib()


def new_figure(columns: int = 1, width: float = 5.0, height: float = 3.6, rows: int = 1) -> tuple[Any, list[Any]]:
    """Return a matplotlib figure with axes of one size, side by side or below each other."""
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, sharex=rows > 1).flat)


def whole_ticks(*axes: Any) -> None:
    """Put ticks of axes that count something at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.set_major_locator(MaxNLocator(integer=True))


def save_figure(figure: Any, file: Path) -> None:
    """Write a PNG aside and then rename it; equal numbers give equal bytes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(file) as aside:
        figure.savefig(aside, format="png", dpi=110, metadata={"Software": None})


class Point(NamedTuple):
    """One policy at one budget; a line joins points of one label."""

    label: str
    cost: float
    """Bytes of the cache over those of a full one, or slots."""
    quality: float
    """Nats, or another measure."""


MARKERS, LINES = "osD^vPX*<>", ("-", "--", ":")
"""Markers and line styles that, with ten colors, distinguish thirty curves, also without colors."""


def plot_lines(axes: Any, lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
    """Plot curves with points, each in its own style."""
    for i, (label, (x, y)) in enumerate(lines.items()):
        style = dict(color=f"C{i % 10}", marker=MARKERS[i % len(MARKERS)], linestyle=LINES[i // 10 % len(LINES)])
        axes.plot(x, y, **style, markersize=4, linewidth=1, label=label)


def legend_beside(axes: Any) -> None:
    """Add a legend beside the axes."""
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)


def plot_quality(
    axes: Any,
    points: Sequence[Point],
    full: float | None,
    ylabel: str,
    xlabel: str = "cache bytes / full cache bytes",
    near: bool = False,
) -> None:
    """Plot quality against cost, with one line for each label.

    Args:
        full: quality of the full cache, drawn as a horizontal line.
        near: True to end the frame just above the lowest four fifths of the points; the legend marks the lines that
            leave it.
    """
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for point in sorted(points, key=lambda point: (point.cost, point.quality)):
        x, y = lines.setdefault(point.label, ([], []))
        x.append(point.cost)
        y.append(point.quality)
    order = dict.fromkeys(point.label for point in points)
    qualities = sorted(point.quality for point in points)
    highest = math.inf
    if near and full is not None and len(points) > 4:
        lowest, high = min(full, qualities[0]), qualities[math.ceil(0.8 * len(points)) - 1]
        highest = high + (high - lowest) / 10
        if highest < qualities[-1]:
            axes.set_ylim(lowest - (high - lowest) / 20, highest)
    labels = {label: label + (" (leaves the frame)" if max(lines[label][1]) > highest else "") for label in order}
    plot_lines(axes, {labels[label]: lines[label] for label in order})
    if full is not None:
        axes.axhline(full, color="black", linewidth=1, linestyle=":", label="full")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    legend_beside(axes)
