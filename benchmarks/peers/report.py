"""Both sides' rows as one page."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.evaluate.tasks.scoring import string_match

Row = dict[str, Any]
PAIRS = {
    "snapkv": ("snapkv", "`snapkv`"),
    "tova": ("tova", "`tova`"),
    "streaming_llm": ("streaming_llm", "`lambda_mask`"),
    "knorm": ("knorm", "`l2`"),
    "observed_attention": ("observed_attention", "`h2o`, `recent=0`"),
    "h2o": ("observed_attention", "`h2o`"),
    "random": ("random", "`random`"),
}
"""kvjax's methods by their names in the rows: kvpress's in theirs, and what kvjax calls them."""
PRESSES = {
    "snapkv": "SnapKVPress",
    "tova": "TOVAPress",
    "streaming_llm": "StreamingLLMPress",
    "knorm": "KnormPress",
    "observed_attention": "ObservedAttentionPress",
    "random": "RandomPress",
}


def overlap(one: Int[np.ndarray, "layers h k"], other: Int[np.ndarray, "layers h k"]) -> tuple[float, float]:
    """The share of kept positions that two sides have in common: of all heads on average, and of the worst head."""
    both = [
        [len(np.intersect1d(*heads)) / one.shape[2] for heads in zip(*layers, strict=True)]
        for layers in zip(one, other, strict=True)
    ]
    return float(np.mean(both)), float(np.min(both))


def paired(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """The mean of other - one over cases, and its standard error; NaN for fewer than two."""
    apart = np.subtract(other, one)
    return float(apart.mean()), float(apart.std(ddof=1)) / math.sqrt(len(apart)) if len(apart) > 1 else math.nan


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def signed(number: float, error: float) -> str:
    """A difference with its standard error; 0 where it is exactly that."""
    return "0" if number == error == 0 else f"{number:+.3f} ± {error:.3f}"


class Sides:
    """Rows and kept positions of both.

    Args:
        folder: where the sides wrote.
    """

    def __init__(self, folder: Path) -> None:
        names = ("kvpress", "kvjax")
        lines = {name: (folder / f"{name}.jsonl").read_text().splitlines() for name in names}
        self.rows: dict[str, list[Row]] = {name: [json.loads(line) for line in lines[name]] for name in names}
        self.arrays = {name: dict(np.load(folder / f"{name}.npz")) for name in names}
        # Arrays of a case are written when all of its rows are.
        self.cases = sorted({int(key.split("/")[0]) for key in set.intersection(*map(set, self.arrays.values()))})
        self.ratios = sorted({row["ratio"] for row in self.of("kvjax", "case")} - {0.0})

    def of(self, side: str, kind: str) -> list[Row]:
        """Rows of a kind."""
        return [row for row in self.rows[side] if row["kind"] == kind]

    def values(
        self, side: str, method: str, ratio: float, families: Sequence[str], value: Callable[[Row], float]
    ) -> list[float]:
        """A number of each case that both sides have, in order."""
        return [
            value(row)
            for row in self.of(side, "case")
            if row["case"] in self.cases
            and (row["method"], row["ratio"]) == (method, ratio)
            and row["family"] in families
        ]

    def measured(self, families: Sequence[str], value: Callable[[Row], float]) -> str:
        """A measure of both sides by method and ratio, with the difference between them."""
        whole = [np.mean(self.values(side, "full", 0.0, families, value)) for side in ("kvpress", "kvjax")]
        rows = [["`full`", "", *[f"{whole[0]:.3f}, {whole[1]:.3f}"] * len(self.ratios)]]
        for name, (press, ours) in PAIRS.items():
            cells: list[str] = []
            for ratio in self.ratios:
                sides = self.values("kvpress", press, ratio, families, value), self.values(
                    "kvjax", name, ratio, families, value
                )
                cells.append(f"{np.mean(sides[0]):.3f}, {np.mean(sides[1]):.3f} ({signed(*paired(*sides))})")
            rows.append([ours, PRESSES[press], *cells])
        return table(["kvjax", "kvpress", *map(str, self.ratios)], rows)

    def overlaps(self) -> list[Row]:
        """What both sides kept in common, by case, method and ratio."""
        made = list[Row]()
        for number in self.cases:
            for name, press in {**{name: pair[0] for name, pair in PAIRS.items()}, "averaged": "observed_attention"}.items():
                for ratio in self.ratios:
                    mean, least = overlap(
                        self.arrays["kvpress"][f"{number}/{press}/{ratio}"], self.arrays["kvjax"][f"{number}/{name}/{ratio}"]
                    )
                    made.append(
                        {"case": number, "kvjax": name, "kvpress": press, "ratio": ratio, "mean": mean, "least": least}
                    )
        return made
