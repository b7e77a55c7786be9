"""Logarithmic axes of the figures about LESS."""

from __future__ import annotations

import math
from typing import Any


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
