"""Figures that are drawn when the site is built, from the rows of measurements beside the reports."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from kvjax.policies.allocation import Plan, layer_slots
from kvjax.utils.files import written_aside

GREY, CHOSEN = "#b8b8b8", ("#0b6e99", "#d1632a", "#4d7c0f", "#7c3aed", "#be123c")
Row = dict[str, Any]


def rows(folder: Path) -> list[Row]:
    """Perplexity of SmolLM2 under policies and budgets, each with the bytes of its cache."""
    files = sorted(folder.glob("**/perplexity.jsonl"))
    found = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [row for row in found if "refused" not in row]


def members(label: str) -> list[str]:
    """The names in what a row calls its policy: `h2o+int8[recent=16]` is of `h2o` and `int8`."""
    return label.partition("[")[0].split("+")


def quality(found: Sequence[Row], name: str, part: str, folder: Path) -> list[Path]:
    """Draw perplexity against bytes on each text, one policy or part among the others.

    Args:
        found: of `rows`.
        name: whose curves stand out.
        part: `policy`, where that is what has the name, or another part.
        folder: of SVG files.

    Returns:
        The files, one for each text of which there are rows.
    """
    files = []
    for text in {row["text"]: None for row in found if _is_of(row, name, part)}:
        figure = Figure(figsize=(4.4, 3.3), layout="constrained")
        axes = figure.subplots()
        _draw(axes, [row for row in found if row["text"] == text], name, part)
        axes.set_title(TITLES[text], fontsize=9)
        axes.set(xlabel="bytes of the cache, share of the full one's", ylabel="perplexity")
        files.append(folder / f"{name}_{text}.svg")
        _save(figure, files[-1])
    return files


TITLES = {"wikitext2_valid": "WikiText-2", "books_valid": "books"}


SHOWN_BY = {("plan", "uniform"): "h2o", ("codec", "plain"): "h2o", ("selection", "topk"): "topk_oracle"}
"""The policies that have parts which no row names: defaults, and what another name stands for."""


CHOICES = {
    "streaming": "streaming: sinks and the newest tokens",
    "snapkv": "snapkv: attention of the prompt's end",
    "keyformer": "keyformer: Gumbel-softmax scores",
    "h2o": "h2o: accumulated attention",
    "less[checkpoint=smollm2_h2o_10]": "less: h2o and a low-rank state",
    "h2o+int8": "h2o+int8: h2o in 8 bits",
}
"""Curves of the overview by what rows call them; the others are grey."""


def overview(found: Sequence[Row], text: str, file: Path) -> None:
    """Draw perplexity against bytes on one text, a few policies in colours of their own among all others.

    Args:
        found: of `rows`.
        text: name of the text.
        file: an SVG.
    """
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    of_text = [row for row in found if row["text"] == text]
    full = next(row["perplexity"] for row in of_text if row["policy"] == "full")
    colours = dict(zip(CHOICES, (*CHOSEN, "black"), strict=True))
    for label, points in _curves(of_text).items():
        points = sorted(points, key=lambda row: row["cache_bytes"])
        style: dict[str, Any] = dict(color=GREY, linewidth=0.8, markersize=2, zorder=1)
        if label in CHOICES:
            style = dict(color=colours[label], linewidth=1.8, markersize=4.5, zorder=3, label=CHOICES[label])
        axes.plot(*_of_curve(points), marker="o", **style)
    axes.axhline(full, color="black", linewidth=1, linestyle=":", label="full cache")
    _scale(axes, full, 5 * full)
    axes.set(xlabel="bytes of the cache, share of the full one's", ylabel="perplexity")
    axes.set_title(f"SmolLM2-135M on {TITLES[text]}; grey: the other policies", fontsize=9)
    axes.legend(fontsize=8, loc=(0.42, 0.62))
    _save(figure, file)


def _is_of(row: Row, name: str, part: str) -> bool:
    first, *others = members(row["policy"])
    if (part, name) in SHOWN_BY:
        part, name = "policy", SHOWN_BY[part, name]
    if part == "policy" and name != "less":
        return name == first and not others
    return name in (first, *others)


def _draw(axes: Any, found: Sequence[Row], name: str, part: str) -> None:
    full = next(row["perplexity"] for row in found if row["policy"] == "full")
    colours, highest = iter(CHOSEN), 5 * full
    for label, points in _curves(found).items():
        chosen = _is_of(points[0], name, part)
        points = sorted(points, key=lambda row: row["cache_bytes"])
        x, y = _of_curve(points)
        style: dict[str, Any] = dict(color=GREY, linewidth=0.8, markersize=2, zorder=1)
        if chosen and label != "full":
            highest = max(highest, *y)
            style = dict(color=next(colours, "black"), linewidth=1.8, markersize=4.5, zorder=3, label=_short(label))
        elif label == "h2o":
            style |= dict(color="#555555", label="h2o")
        axes.plot(x, y, marker="o", **style)
    axes.axhline(full, color="black", linewidth=1.6 if name == "full" else 0.8, linestyle=":", label="full")
    _scale(axes, full, min(1.1 * highest, 30 * full))
    axes.legend(fontsize=7)


def _curves(found: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each curve: a policy over budgets, or over its settings where it has no budget."""
    curves: dict[str, list[Row]] = {}
    for row in found:
        label = row["policy"] if row["budget"] != 1 else members(row["policy"])[0]
        curves.setdefault(label, []).append(row)
    return curves


def _of_curve(points: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Return shares of a full cache's bytes, and perplexities."""
    shares = [row["cache_bytes"] / row["full_cache_bytes"] for row in points]
    return shares, [row["perplexity"] for row in points]


def _scale(axes: Any, full: float, highest: float) -> None:
    """Show perplexities from the full cache's to `highest`, both axes logarithmic."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(0.95 * full, highest)
    axes.set_xticks([0.02, 0.05, 0.1, 0.25, 0.5, 1], ["2%", "5%", "10%", "25%", "50%", "100%"])
    ticks = [round(full * factor) for factor in (1, 1.25, 1.5, 2, 3, 4, 6, 10, 20) if full * factor < highest]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.tick_params(labelsize=8)


def _short(label: str) -> str:
    # Without where its kernels lie, which is no setting of the method.
    return re.sub(r"\[(?:residual\.)?checkpoint=\w*?_(\d+)\]", r", kernels trained at \1% of the slots", label)


def budgets(plan: Plan, file: Path, layers: int = 32, budget: int = 128) -> None:
    """Draw the slots that a plan gives each layer.

    Args:
        plan: which spreads the budget over layers.
        file: an SVG.
        layers: of the model.
        budget: slots per head, on average over the layers.
    """
    figure = Figure(figsize=(6.0, 2.3), layout="constrained")
    axes = figure.subplots()
    axes.bar(range(layers), layer_slots(plan, budget, layers), color=CHOSEN[0])
    axes.axhline(budget, color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel="layer", ylabel="slots of a head")
    axes.tick_params(labelsize=8)
    _save(figure, file)


def floors(project: Path, file: Path) -> list[list[str]]:
    """Draw what stands on what, as pyproject.toml has it and lint-imports holds it.

    Args:
        project: pyproject.toml.
        file: an SVG.

    Returns:
        The floors, the highest first, each with its modules.
    """
    contracts = tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract.get("containers") == ["kvjax"])
    found = [[module.strip() for module in layer.split("|")] for layer in layers]
    height = 0.36
    figure = Figure(figsize=(6.4, height * (len(found) + 1.5)))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, 100), ylim=(-1.5, len(found)))
    axes.axis("off")
    for row, modules in enumerate(found):
        y, width = len(found) - 1 - row, 96 / len(modules)
        for column, module in enumerate(modules):
            left = 2 + column * width
            axes.add_patch(Rectangle((left, y + 0.06), width - 0.6, 0.86, facecolor=_colour(module), edgecolor="none"))
            size = 9 if len(modules) == 1 else 7
            axes.text(left + width / 2, y + 0.47, module, ha="center", va="center", fontsize=size, family="monospace")
    axes.add_patch(Rectangle((2, -1.2), 95.4, 0.86, facecolor="#d9d9d9", edgecolor="none"))
    below = "pallas_kernels: imports nothing of kvjax"
    axes.text(50, -0.78, below, ha="center", va="center", fontsize=9, family="monospace")
    _save(figure, file)
    return found


def _colour(module: str) -> str:
    groups = {
        "#bfe3d0": ("inference", "methods", "policies", "models", "cache"),
        "#fde3c4": ("model", "generation"),
        "#cfe0f5": ("serving", "evaluation", "training"),
        "#efe3f5": ("__main__", "cli", "generate"),
    }
    return next((colour for colour, names in groups.items() if module in names), "#e6e6e6")


def _save(figure: Figure, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "kvjax"}), written_aside(file) as aside:
        figure.savefig(aside, format="svg", metadata={"Date": None})


if __name__ == "__main__":  # the figure of the README
    DOCS = Path(__file__).parent.parent
    overview(rows(DOCS / "results" / "smollm2"), "wikitext2_valid", DOCS / "quality.svg")
