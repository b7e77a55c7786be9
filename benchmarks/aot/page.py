"""The rows of all chips as Markdown, and as a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.aot.chips import CHIPS, LATENCY, SPECIFICATIONS
from benchmarks.aot.programs import programs

Row = dict[str, Any]

PARTS = {
    "products": "weights' products",
    "attention": "attention",
    "eviction": "eviction",
    "scores": "scores",
    "residual": "low rank",
    "rest": "everything else",
}
"""Parts of a step, and their names on the page."""

INTRODUCTION = f"""\
Compilers' reports on programs for chips that were not available; nothing on this page has run. Made by
`python -m benchmarks.aot --steps`, with `--chips v4,v5e,v5p,v6e` if `jax[tpu]` is installed and
`--chips a100,h100` if the CUDA plugin of jax is. Rows of the same compiler are not compiled again; use `--redo`
after a change of the programs.

The **limit** is the time that the chip's memory takes to move all necessary bytes once. The **estimate** is
computed from the reports of TPU compilers, and is at least the limit:
- A Pallas kernel takes the longer of two times: that of its bundles (VLIW instructions of its final schedule, a cycle
  each: once, in every grid step, at a row's end) and that of the traffic of its blocks. Copies that a grid step starts
  and waits for itself add a wait of {LATENCY * 1e6:.0f} microsecond for all copies in flight together, which is assumed
  and not measured. Copies for which a later step waits are free. On chips of two cores, both share parallel work.
- An XLA fusion takes the cycles that XLA estimates. Data movement (reshapes, reversals), for which XLA has no estimate,
  takes the bundles of its schedule. Prefetched weights are in no estimate; all products with weights together take at
  least the time of their bytes. Gathers and scatters have no estimate (XLA reports 2⁶³ - 1 cycles), and loops, also
  those inside a grid step, count one iteration (marked ≥, except for the lookup of embeddings) unless their kernel
  declares a maximum.
- Skipped parts of a kernel without matrix products (`evict`) count in every grid step.
- Masked work counts as if nothing were masked, so estimates for causal prompts are about twice too high; prompts are
  bound by matrix products, not by bytes.
- The time to start a program and its kernels, and memory below its peak bandwidth, are not included."""


def markdown(kept: dict[str, dict[str, dict[str, Row]]]) -> str:
    """Return the page as Markdown.

    Args:
        kept: for each chip, the rows of `kernels` and of `steps`, by name.
    """
    chips = [chip for chip in SPECIFICATIONS if chip in kept]
    compilers = {row["compiler"] for chip in chips for kind in kept[chip].values() for row in kind.values()}
    text = [
        "# Programs compiled for other chips",
        INTRODUCTION,
        f"Compilers: {'; '.join(sorted(compilers))}.",
        "## Chips",
    ]
    text.append(
        table(
            ["chip", "bandwidth, GB/s", "clock, GHz", "cores", "from"],
            [
                [chip, f"{known.bandwidth / 1e9:,.0f}", f"{known.clock / 1e9:.2f}", f"{known.cores}", known.source]
                for chip, known in SPECIFICATIONS.items()
            ],
        )
    )
    stepping = [chip for chip in chips if kept[chip]["steps"]]
    if stepping:
        text += ["## Decode steps", STEPS, "![parts of a step over its limit](chips/steps.png)"]
    for chip in stepping:
        text += [f"### Decode steps on {chip}", _steps(kept[chip]["steps"].values())]
    text.append("## Kernels")
    text.append(KERNELS)
    for chip in chips:
        rows = _in_order(kept[chip]["kernels"].values())
        if rows:
            text += [f"### Kernels on {chip}", _tpu_kernels(rows) if chip in CHIPS else _gpu_kernels(rows)]
    text += ["## Memory", MEMORY, _memory({chip: kept[chip]["kernels"] for chip in chips})]
    return "\n\n".join(text) + "\n"


STEPS = """\
Milliseconds of one decode step of a whole model in bfloat16, of which two layers (for Gemma 3 six, its period) were
compiled; work outside the layers counts once. The limit moves the weights, the caches, the arrays of a policy
(LESS kernels) and the logits once each. *Besides* is the remaining time as a fraction of the limit: the estimate
without products of the model's weights and without the time of all other bytes."""

KERNELS = """\
MB: necessary traffic, each byte once. Bundles: once, per grid step, and at a row's end (parts of a step that other
steps skip). Copies: number that each grid step starts and waits for itself, and number of waits. XLA: cycles of
the fusions around the kernel. The last column is XLA's estimate of the same operation without a kernel. For GPUs: the
worst kernel of a program, including XLA's own; bytes spilled per thread, bytes of shared memory per block."""

MEMORY = """\
Megabytes in device memory: arguments and results of a program, those that share memory, and temporary memory on each
chip."""


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """Return a Markdown table; all columns except the first ones are right-aligned."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * words + "--:|" * (len(headings) - words)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _steps(rows: Iterable[Row]) -> str:
    lines: list[list[str]] = []
    for row in sorted(rows, key=_order):
        parts = [f"{1e3 * row['parts'][part]:.3f}" for part in PARTS]
        names = [f"{row['model']}, {row['rows']} x {row['slots']}", row["policy"]]
        moved = f"{(row['weights'] + row['caches']) / 1e9:.2f}"
        times = [moved, f"{1e3 * row['limit']:.3f}", *parts, f"{_least(row)}{1e3 * row['estimate']:.3f}"]
        lines.append([*names, *times, f"{row['estimate'] / row['limit']:.2f}", f"{row['beside'] / row['limit']:.1%}"])
    headings = ["GB", "limit", *PARTS.values(), "estimate", "over limit", "besides"]
    return table(["model, rows x slots", "policy", *headings], lines, 2)


def _order(row: Row) -> tuple[Any, ...]:
    return row["model"], row["rows"], row["number"]


def _in_order(rows: Iterable[Row]) -> list[Row]:
    """Sort rows as in `programs()`, and drop the rows that it no longer has."""
    order = {(program.op, program.label): number for number, program in enumerate(programs())}
    known = (row for row in rows if (row["op"], row["size"]) in order)
    return sorted(known, key=lambda row: (order[row["op"], row["size"]], row["implementation"]))


def _least(row: Row) -> str:
    # The rows of the embedding table are few.
    unknown = any(part != "rest" or "layer" in origin.split("/") for _, part, origin in row["unknown"])
    return "≥ " if row["loops"] or unknown or any(map(_uncounted, row["kernels"])) else ""


def _uncounted(kernel: Row) -> bool:
    return bool(kernel["inner"]) and not kernel.get("turns")


def _tpu_kernels(rows: list[Row]) -> str:
    plain = {(row["op"], row["size"]): row for row in rows if row["implementation"] == "xla"}
    lines: list[list[str]] = []
    for row in rows:
        if row["implementation"] == "xla":
            continue
        other = plain.get((row["op"], row["size"]))
        lines.append(
            [
                row["op"],
                row["size"],
                f"{row['bytes'] / 1e6:,.2f}",
                f"{1e6 * row['limit']:,.1f}",
                "; ".join(bundles(kernel) for kernel in row["kernels"]),
                "; ".join(f"{kernel['copies']} in {kernel['waits']}" for kernel in row["kernels"] if kernel["copies"]),
                f"{row['fusion_cycles']:,}",
                _microseconds(row),
                "" if other is None else _microseconds(other),
            ]
        )
    headings = [
        "operation",
        "size",
        "MB",
        "limit, µs",
        "bundles",
        "copies",
        "XLA",
        "estimate, µs",
        "without a kernel, µs",
    ]
    return table(headings, lines, 2)


def _microseconds(row: Row) -> str:
    # XLA's estimate of a fusion may be below the time of its traffic.
    return f"{_least(row)}{1e6 * max(row['estimate'], row['limit']):,.1f}"


def bundles(kernel: Row) -> str:
    """Format `29 + 256 x 784 + 32 x 141`: once, for each grid step, at the end of each row."""
    steps = 1
    for size in kernel["grid"]:
        steps *= size
    rows = steps // kernel["grid"][-1] if kernel["grid"] else 1
    rarely = kernel["rarely"] + max(kernel.get("turns", 0) - 1, 0) * kernel["inner"]
    ends = f" + {rows:,} x {rarely:,}" if rarely else ""
    return f"{kernel['once']:,} + {steps:,} x {kernel['step']:,}{ends}"


GPU = {"registers": max, "spills": max, "shared": max, "occupancy": min}
"""The worst value over a program's kernels."""


def _gpu_kernels(rows: list[Row]) -> str:
    lines = [
        [
            row["op"],
            row["size"],
            row["implementation"],
            f"{row['bytes'] / 1e6:,.2f}",
            f"{1e6 * row['limit']:,.1f}",
            *(f"{worst(row[name].values(), default=0):,}" for name, worst in GPU.items()),
            f"{row['seconds']:.1f}",
        ]
        for row in rows
    ]
    headings = ["registers", "spills, bytes", "shared, bytes", "blocks per multiprocessor", "seconds to compile"]
    return table(["operation", "size", "implementation", "MB", "limit, µs", *headings], lines, 3)


def _memory(kept: dict[str, dict[str, Row]]) -> str:
    of_programs: dict[tuple[str, ...], dict[str, Row]] = {}
    for chip, rows in kept.items():
        for row in rows.values():
            of_programs.setdefault((row["op"], row["size"], row["implementation"]), {})[chip] = row
    lines: list[list[str]] = []
    for first in _in_order(next(iter(rows.values())) for rows in of_programs.values()):
        names = first["op"], first["size"], first["implementation"]
        of_chips = of_programs[names]
        sizes = [first[name] for name in ("argument", "output", "alias")]
        sizes += [of_chips[chip]["temp"] if chip in of_chips else None for chip in kept]
        lines.append([*names, *("" if size is None else f"{size / 1e6:.2f}" for size in sizes)])
    return table(["operation", "size", "implementation", "arguments", "output", "in place", *kept], lines, 3)


def plot(
    kept: dict[str, dict[str, dict[str, Row]]], file: Path, models: Sequence[str] = ("llama_7b", "llama_8b")
) -> None:
    """Plot the parts of the steps of large models over their limits, one panel for each chip and model.

    Args:
        kept: as for `markdown`.
        file: path of a PNG.
        models: names of the models to show.

    Raises:
        ModuleNotFoundError: matplotlib is not installed, and there are such steps.
    """
    panels = [
        (chip, model, rows)
        for model in models
        for chip in SPECIFICATIONS
        if chip in kept
        if (rows := sorted((row for row in kept[chip]["steps"].values() if row["model"] == model), key=_order))
    ]
    if not panels:
        return
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    columns = max(sum(model == each for _, each, _ in panels) for model in models)
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(3.2 * columns, 2.9 * lines), squeeze=False, sharey=True)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (chip, model, rows) in zip(axes.flat, panels, strict=False):
        names, bottom = [row["policy"] for row in rows], [0.0] * len(rows)
        for part, label in PARTS.items():
            heights = [row["parts"][part] / row["limit"] for row in rows]
            axis.bar(names, heights, bottom=bottom, label=label)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_title(f"{model} on {chip}", fontsize=9)
        axis.tick_params(axis="x", rotation=60, labelsize=7)
        axis.tick_params(axis="y", labelsize=7)
    axes[0, 0].set_ylabel("estimate over limit", fontsize=8)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="upper center", ncols=3, fontsize=6)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.3 / (2.9 * lines)))
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=80)
    pyplot.close(figure)
