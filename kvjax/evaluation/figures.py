"""Figures, mostly of quality against cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvjax.utils.files import written_aside


def new_figure(columns: int = 1, width: float = 5.0, height: float = 3.6) -> tuple[Any, list[Any]]:
    """Return a matplotlib figure with axes side by side.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            'figures need matplotlib: pip install matplotlib, or in a clone pip install -e ".[plots]".'
        ) from None
    figure = Figure(figsize=(width * columns, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def save_figure(figure: Any, file: Path) -> None:
    """Write a PNG aside and then rename it; equal numbers give equal bytes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(file) as aside:
        figure.savefig(aside, format="png", dpi=110, metadata={"Software": None})


@dataclasses.dataclass(frozen=True)
class Point:
    """One policy at one budget.

    Args:
        label: name of the policy; a line joins points of one label.
        cost: bytes of the cache over those of a full one, or slots.
        quality: nats, or another measure.
    """

    label: str
    cost: float
    quality: float


MARKERS, LINES = "osD^vPX*<>", ("-", "--", ":")
"""Markers and line styles that, with ten colors, distinguish thirty curves, also without colors."""


def plot_lines(axes: Any, lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
    """Plot curves with points, each in its own style.

    Args:
        axes: matplotlib axes.
        lines: x and y for each label.
    """
    for i, (label, (x, y)) in enumerate(lines.items()):
        style = dict(color=f"C{i % 10}", marker=MARKERS[i % len(MARKERS)], linestyle=LINES[i // 10 % len(LINES)])
        axes.plot(x, y, **style, markersize=4, linewidth=1, label=label)


def legend_beside(axes: Any) -> None:
    """Add a legend beside the axes."""
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)


def log_scale(axes: Any) -> None:
    """Make the y axis logarithmic, with several tick labels in plain notation for any range."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    decades = math.log10(high / low)
    between = (
        (1.0,) if decades > 3 else (1.0, 2.0, 5.0) if decades > 1 else (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0)
    )
    axes.yaxis.set_major_locator(LogLocator(subs=between))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", linewidth=0.3)


def plot_quality(
    axes: Any,
    points: Sequence[Point],
    full: float | None,
    ylabel: str,
    xlabel: str = "cache bytes / full cache bytes",
    log: bool = False,
    near: bool = False,
) -> None:
    """Plot quality against cost, with one line for each label.

    Args:
        axes: matplotlib axes.
        points: in any order.
        full: quality of the full cache, drawn as a horizontal line.
        ylabel: label of quality.
        xlabel: label of cost.
        log: True for a logarithmic quality axis.
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
        lowest, most = min(full, qualities[0]), qualities[math.ceil(0.8 * len(points)) - 1]
        highest = most + (most - lowest) / 10
        if highest < qualities[-1]:
            axes.set_ylim(lowest - (most - lowest) / 20, highest)
    named = {label: label + (" (leaves the frame)" if max(lines[label][1]) > highest else "") for label in order}
    plot_lines(axes, {named[label]: lines[label] for label in order})
    if full is not None:
        axes.axhline(full, color="black", linewidth=1, linestyle=":", label="full")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    if log:
        log_scale(axes)
    legend_beside(axes)
