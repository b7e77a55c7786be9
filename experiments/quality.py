"""Quality against kept bytes of any policies: `kvjax evaluate quality --policies h2o,keyformer`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from experiments.runs import Runs
from experiments.store import open_store
from kvjax import methods
from kvjax.cli.options import add_policies, parts_of
from kvjax.evaluation.figures import Point, new_figure, plot_quality, save_figure
from kvjax.evaluation.refusals import Unsupported, refusals
from kvjax.evaluation.texts import passages
from kvjax.methods.notation import compared
from kvjax.policies.policy import Policy
from kvjax.utils.files import write_text
from kvjax.utils.markdown import markdown_table
from kvjax.utils.settings import parse_budget

Choice = tuple[str, Policy, int | float]
"""Name, policy and budget."""


def against_bytes(runs: Runs, choices: Sequence[Choice], distances: Sequence[int] = ()) -> tuple[str, Path]:
    """Measure perplexity, recall and bytes of policies and budgets.

    Args:
        runs: runs for the perplexities.
        choices: policies to compare; the full cache is added.
        distances: tokens between facts and questions, for models that answer the embedded model's questions.

    Returns:
        A Markdown table, with a line for each choice that does not fit, and the figure's file.

    Raises:
        ValueError: matplotlib is missing.
    """
    rows, left_out = [], []
    points: dict[str, list[Point]] = {text: [] for text in runs.texts}
    full: dict[str, float] = {}
    for label, policy, budget in [("full", methods.policy("full"), 1.0), *choices]:
        try:
            with refusals():
                run = runs.run(label, policy, budget)
                recalled = [runs.recall(label, policy, budget, distance) for distance in distances]
        except Unsupported as error:
            left_out.append(f"\n{label} at {budget:g} is left out: {error}\n")
            continue
        if run is None:
            continue
        nats = [f(text) for text in runs.texts for f in (run.nats, run.per_byte)]
        rows.append([label, f"{budget:g}", f"{run.share:.1%}", *nats, *recalled])
        for text in runs.texts:
            if label == "full":
                full[text] = run.nats(text)
            else:
                points[text].append(Point(label, run.share, run.nats(text)))
    headings = [f"{text}, nats per {what}" for text in runs.texts for what in ("token", "byte")]
    headings += [f"recall at {distance}" for distance in distances]
    figure, axes = new_figure(len(runs.texts))
    for text, axis in zip(runs.texts, axes, strict=True):
        plot_quality(axis, points[text], full.get(text), "nats per token")
        axis.set_title(text)
    file = runs.directory / "quality" / "quality.png"
    save_figure(figure, file)
    return markdown_table(["policy", "budget", "bytes / full", *headings], rows) + "".join(left_out), file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of the report."""
    add_policies(parser, "streaming,h2o,tova,keyformer")
    parser.add_argument("--budgets", default="0.05,0.1,0.25", help="slots, or fractions of the passages")
    parser.add_argument("--prefix", type=int, default=1, help="tokens read at once before the rest, as a prompt")
    parser.add_argument("--recall", type=int, nargs="+", default=[], metavar="DISTANCE", help="also ask for facts")


def run(options: argparse.Namespace) -> None:
    """Measure the missing values, and write `quality.md` with its figure.

    Raises:
        ValueError: a text, a policy or a budget does not fit.
    """
    from kvjax.model import load

    made = compared(options.policies, *parts_of(options))
    budgets = [parse_budget(text) for text in options.budgets.split(",")]
    model = load(options.model, "float32", options.revision, mesh=options.mesh)
    read = passages(model, options.text, options.rows, options.length)
    store = open_store(options, "quality")
    runs = Runs(model, read, store, (), options.out, options.prefix)
    # A policy that sets its own slots has no budget.
    choices = [
        (name, policy, budget)
        for name, policy in made.items()
        if name != "full"
        for budget in ([1.0] if policy.plan.sizing.mode == "profiled" else budgets)
    ]
    shown, file = against_bytes(runs, choices, options.recall)
    write_text(
        options.out / "quality.md",
        f"# Quality against kept bytes on {model.name}\n\nMade by `{options.command}`. "
        f"Budgets are slots or fractions of {options.length} tokens; the first "
        f"{options.prefix} are the prompt, the others are read token by token with eviction.\n\n{shown}\n"
        f"![quality](quality/{file.name})\n",
    )
    print(options.out / "quality.md")
