"""Both sides' rows as one page."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.evaluation import summary
from kvjax.evaluation.tasks.cases import string_match

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
"""kvjax's methods by their names in the rows: kvpress's name in its rows, and kvjax's name."""
PRESSES = {
    "snapkv": "SnapKVPress",
    "tova": "TOVAPress",
    "streaming_llm": "StreamingLLMPress",
    "knorm": "KnormPress",
    "observed_attention": "ObservedAttentionPress",
    "random": "RandomPress",
}


def overlap(one: Int[np.ndarray, "layers h k"], other: Int[np.ndarray, "layers h k"]) -> tuple[float, float]:
    """Return the share of kept positions that two sides have in common: the mean over heads, and the worst head."""
    both = [
        [len(np.intersect1d(*heads)) / one.shape[2] for heads in zip(*layers, strict=True)]
        for layers in zip(one, other, strict=True)
    ]
    return float(np.mean(both)), float(np.min(both))


def paired(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return the mean of other - one over cases, and its standard error; NaN for fewer than two."""
    return summary.paired(other, one)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def signed(number: float, error: float) -> str:
    """Format a difference with its standard error; 0 if it is exactly 0."""
    return "0" if number == error == 0 else f"{number:+.3f} ± {error:.3f}"


class Sides:
    """Rows and kept positions of both sides.

    Args:
        folder: folder with the output of both sides.
    """

    def __init__(self, folder: Path) -> None:
        names = ("kvpress", "kvjax")
        lines = {name: (folder / f"{name}.jsonl").read_text().splitlines() for name in names}
        self.rows: dict[str, list[Row]] = {name: [json.loads(line) for line in lines[name]] for name in names}
        self.arrays = {name: dict(np.load(folder / f"{name}.npz")) for name in names}
        # The arrays of a case are complete once all of its rows are written.
        self.cases = sorted({int(key.split("/")[0]) for key in set.intersection(*map(set, self.arrays.values()))})
        for name, rows in self.rows.items():
            self.rows[name] = [row for row in rows if row["kind"] != "case" or row["case"] in self.cases]
        self.ratios = sorted({row["ratio"] for row in self.of("kvjax", "case")} - {0.0})

    def of(self, side: str, kind: str) -> list[Row]:
        """Return the rows of a kind; for cases, only those that both sides have."""
        return [row for row in self.rows[side] if row["kind"] == kind]

    def values(
        self, side: str, method: str, ratio: float, families: Sequence[str], value: Callable[[Row], float]
    ) -> list[float]:
        """Return one number for each case that both sides have, in order."""
        return [
            value(row)
            for row in self.of(side, "case")
            if (row["method"], row["ratio"]) == (method, ratio) and row["family"] in families
        ]

    def measured(self, families: Sequence[str], value: Callable[[Row], float]) -> str:
        """Return a table of a measure of both sides by method and ratio, with the difference between them."""
        whole = [np.mean(self.values(side, "full", 0.0, families, value)) for side in ("kvpress", "kvjax")]
        rows = [["`full`", "", *[f"{whole[0]:.3f}, {whole[1]:.3f}"] * len(self.ratios)]]
        for name, (press, ours) in PAIRS.items():
            cells: list[str] = []
            for ratio in self.ratios:
                sides = (
                    self.values("kvpress", press, ratio, families, value),
                    self.values("kvjax", name, ratio, families, value),
                )
                cells.append(f"{np.mean(sides[0]):.3f}, {np.mean(sides[1]):.3f} ({signed(*paired(*sides))})")
            rows.append([ours, PRESSES[press], *cells])
        return table(["kvjax", "kvpress", *map(str, self.ratios)], rows)

    def overlaps(self) -> list[Row]:
        """Return the positions that both sides kept in common, by case, method and ratio."""
        made = list[Row]()
        for number in self.cases:
            for name, press in {
                **{name: pair[0] for name, pair in PAIRS.items()},
                "averaged": "observed_attention",
            }.items():
                for ratio in self.ratios:
                    mean, least = overlap(
                        self.arrays["kvpress"][f"{number}/{press}/{ratio}"],
                        self.arrays["kvjax"][f"{number}/{name}/{ratio}"],
                    )
                    made.append(
                        {"case": number, "kvjax": name, "kvpress": press, "ratio": ratio, "mean": mean, "least": least}
                    )
        return made


def percent(share: float) -> str:
    """Format a share in percent."""
    return f"{100 * share:.1f}%"


def overlap_table(rows: Sequence[Row], ratios: Sequence[float]) -> str:
    """Return a table of the mean overlap of each method at each ratio, and of the worst head of any case."""
    lines = list[list[str]]()
    for name, (press, ours) in {**PAIRS, "averaged": ("observed_attention", "`h2o`'s sums / queries")}.items():
        cells: list[str] = []
        for ratio in ratios:
            found = [row for row in rows if (row["kvjax"], row["ratio"]) == (name, ratio)]
            mean, least = np.mean([row["mean"] for row in found]), min(row["least"] for row in found)
            cells.append(f"{percent(float(mean))} ({percent(least)})")
        lines.append([ours, PRESSES[press], *cells])
    return table(["kvjax", "kvpress", *map(str, ratios)], lines)


def context_table(sides: Sides) -> str:
    """Return a table of processor seconds for a context by method, and their ratio to the same side's full cache."""
    theirs = {(row["attention"], row["method"]): row["seconds"] for row in sides.of("kvpress", "context")}
    ours = {row["method"]: row["seconds"] for row in sides.of("kvjax", "context")}
    lines = [["`full`", "no press", f"{theirs['sdpa', 'full']:.2f}", f"{ours['full']:.2f}"]]
    lines.append(["", "no press, eager attention", f"{theirs['eager', 'full']:.2f}", ""])
    for name, (press, called) in PAIRS.items():
        kind = "eager" if press == "observed_attention" else "sdpa"
        seconds = theirs[kind, press]
        cells = (
            f"{seconds:.2f} ({seconds / theirs[kind, 'full']:.2f})",
            f"{ours[name]:.2f} ({ours[name] / ours['full']:.2f})",
        )
        lines.append([called, PRESSES[press], *cells])
    return table(["kvjax", "kvpress", "seconds of kvpress", "seconds of kvjax"], lines)


def cost_table(sides: Sides) -> str:
    """Return a table of the bytes of a compressed context, and seconds for a question and its answer."""
    names = ("kvpress", "kvjax")
    size = {
        name: {row["ratio"]: row["cache_bytes"] for row in sides.of(name, "case") if row["method"] in ("full", "knorm")}
        for name in names
    }
    seconds = {name: {row["ratio"]: row["seconds"] for row in sides.of(name, "answer")} for name in names}
    lines = [
        [
            str(ratio),
            *(f"{size[name][ratio]:,}" for name in names),
            *(f"{seconds[name][ratio]:.2f}" if ratio in seconds[name] else "" for name in names),
        ]
        for ratio in (0.0, *sides.ratios)
    ]
    header = ["ratio", "bytes of kvpress", "bytes of kvjax (`l2`)", "answer, kvpress", "answer, kvjax"]
    return table(header, lines)


def page(sides: Sides, overlaps: Sequence[Row]) -> str:
    """Return the report."""
    run = {name: sides.of(name, "run")[0]["versions"] for name in sides.rows}
    versions = ", ".join(f"{name} {version}" for side in run.values() for name, version in side.items())
    apart = max(
        float(np.abs(sides.arrays["kvpress"][f"{n}/logits"] - sides.arrays["kvjax"][f"{n}/logits"]).max())
        for n in sides.cases
    )
    peaks = {name: max(row["peak_bytes"] for row in rows) / 2**20 for name, rows in sides.rows.items()}
    flatten_requests, every = ("single", "multi_key"), ("single", "multi_key", "text")
    counted = {name: len(sides.values("kvjax", "full", 0.0, [name], lambda row: 1.0)) for name in every}

    def match(row: Row) -> float:
        return string_match(row["answer"], row["expected"])

    def nats(row: Row) -> float:
        return row["nats"]

    found = {
        "versions": versions,
        "cases": ", ".join(f"{count} of `{name}`" for name, count in counted.items()),
        "apart": f"{apart:.1e}",
        "overlaps": overlap_table(overlaps, sides.ratios),
        "question_nats": sides.measured(flatten_requests, nats),
        "text_nats": sides.measured(("text",), nats),
        "match": sides.measured(flatten_requests, match),
        "contexts": context_table(sides),
        "costs": cost_table(sides),
        "peaks": f"{peaks['kvpress']:,.0f} MiB for kvpress and {peaks['kvjax']:,.0f} MiB for kvjax",
    }
    text = (Path(__file__).parent / "page.md").read_text()
    for name, value in found.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, required=True, help="the folder that both sides wrote to")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="the folder of peers.md and peers/")
    options = parser.parse_args()
    sides = Sides(options.rows)
    overlaps = sides.overlaps()
    (options.out / "peers").mkdir(parents=True, exist_ok=True)
    for name, rows in {**sides.rows, "overlap": overlaps}.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (options.out / "peers" / f"{name}.jsonl").write_text(lines)
    (options.out / "peers.md").write_text(page(sides, overlaps))


if __name__ == "__main__":
    main()
