"""Benchmark results as tables and numbers."""

from __future__ import annotations

from typing import Any

from kvjax.evaluation.bench.race import Contender


def print_timings(contenders: list[Contender], tokens: int, title: str) -> list[dict[str, Any]]:
    """Print and return the medians, with ratios to the first row and to `streaming` at the same budget."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=title)
    for heading in ("policy", "budget", "ms", "tokens/s", "cache MB", "temporary MB", "time / first", "/ streaming"):
        shown.add_column(heading, justify="left" if heading == "policy" else "right")
    rows = []
    streaming = {c.budget: c.median for c in contenders if c.name == "streaming"}
    for c in contenders:
        to_streaming = c.median / streaming[c.budget] if c.budget in streaming else None
        row = dict(
            policy=c.name,
            budget=c.budget,
            milliseconds=1e3 * c.median,
            tokens_per_second=tokens / c.median,
            cache_bytes=c.cache_bytes,
            temporary_bytes=c.temporary_bytes,
            time_over_first=c.median / contenders[0].median,
            time_over_streaming=to_streaming,
        )
        rows.append(row)
        megabytes = ["" if x is None else f"{x / 1e6:.1f}" for x in (c.cache_bytes, c.temporary_bytes)]
        last = "" if to_streaming is None else f"{to_streaming:.2f}"
        shown.add_row(
            c.name, c.budget, f"{1e3 * c.median:.1f}", f"{tokens / c.median:,.0f}", *megabytes,
            f"{row['time_over_first']:.2f}", last,
        )  # fmt: skip
    Console(width=110).print(shown)
    return rows
