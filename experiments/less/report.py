"""Quality that LESS recovers after eviction, and the paper's seven claims: `kvjax evaluate less`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from experiments.claims import Section, claims_table, verdicts
from experiments.less.attention import hellinger, residual_rank
from experiments.less.checkpoints import Kernels, Shelf, even_slots, open_shelf
from experiments.less.measurements import Less
from experiments.less.tables import bases, features, performer, perplexities, transfer
from experiments.runs import Runs
from experiments.store import open_store
from kvjax.evaluation.texts import passages
from kvjax.utils.files import write_text
from kvjax.utils.markdown import markdown_table

PIECES: dict[str, Callable[[Less], Section]] = {
    "perplexity": perplexities,
    "performer": performer,
    "transfer": transfer,
    "bases": bases,
    "hellinger": hellinger,
    "features": features,
    "rank": residual_rank,
}


_RECIPE = ("sequences", "length", "epochs", "halve_every", "batch", "rate", "dropout", "seed")
"""Settings of the kernels' training that the report repeats."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of the report."""
    parser.add_argument(
        "--checkpoints", nargs="+", default=[], metavar="NAME=DIR", help="kernels; default: shipped ones"
    )
    parser.add_argument(
        "--sweep", nargs="+", default=[], metavar="NAME=DIR", help="kernels of several sizes, trained alike"
    )
    parser.add_argument("--budgets", default="0.02,0.05,0.1", help="shares of the model's context")
    parser.add_argument(
        "--only", nargs="+", choices=tuple(PIECES), help="measure these; the others as they are on disk"
    )


def run(options: argparse.Namespace) -> None:
    """Measure the missing values, and write `less.md` with its figures.

    Raises:
        ValueError: a text, a checkpoint or a budget does not fit.
    """
    from kvjax.model import load

    model = load(options.model, "float32", options.revision, mesh=options.mesh)
    context = model.config.max_positions
    budgets = {f"{100 * share:g}%": even_slots(share, context) for share in map(_share, options.budgets.split(","))}
    for share, slots in budgets.items():
        if slots < 8 or 2 * slots + 2 > options.length:
            raise ValueError(
                f"{share} of {context} are {slots} slots, not from 8 to half of the texts' {options.length}."
            )
    shelf = open_shelf(model, options.checkpoints)
    sweep = open_shelf(model, options.sweep) if options.sweep else Shelf(())
    read = passages(model, options.text, options.rows, options.length)
    store = open_store(options, "less")
    beyond = tuple(sorted({*budgets.values(), 2 * max(budgets.values())}))
    less = Less(Runs(model, read, store, beyond, options.out), shelf, sweep, budgets)
    sections = []
    for name, piece in PIECES.items():
        with less.runs.only_stored(options.only is not None and name not in options.only):
            sections.append(piece(less))
    write_text(options.out / "less.md", _document(less, sections, options))
    print(options.out / "less.md")


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise ValueError(f"--budgets: {text!r} is not a share of the context between 0 and 1, such as 0.05.")
    return share


def _document(less: Less, sections: list[Section], options: argparse.Namespace) -> str:
    runs, config = less.runs, less.runs.model.config
    claims = [claim for section in sections for claim in section.claims]
    return (
        f"# LESS on {runs.model.name}\n\n"
        f"Made by `{options.command}`; figures and raw numbers are in `less/`.\n\n"
        f"{options.rows} passages of {options.length} tokens of each text, read token by token with eviction "
        "from the first token on, in float32. "
        f"Budgets are shares of the model's {config.max_positions} positions: "
        + ", ".join(f"{share} = {slots} slots" for share, slots in less.budgets.items())
        + f" per KV head.\n\nOf {len(claims)} claims: {verdicts(claims)}. "
        "Verdicts are computed from the numbers, rules are in `experiments/less/`.\n\n## Kernels\n\n"
        + _kernels((*less.shelf.kernels, *less.sweep.kernels))
        + "".join(f"\n## {s.title}\n\n{claims_table(s.claims)}{s.body}" for s in sections)
    )


def _kernels(every: tuple[Kernels, ...]) -> str:
    rows, commands = [], {}
    for k in every:
        training = k.settings.training
        less_by = [f"{1 - error['after'] / error['before']:.0%}" for error in training.get("errors", [])]
        rows.append([k.name, k.settings.policy, k.slots, k.features, ", ".join(less_by) or None])
        given = {name: training[name] for name in _RECIPE if name in training}
        words = f"--policy {k.settings.policy} --budget {k.slots} --features {k.features} --hidden {k.settings.hidden} "
        commands[k.name] = words + " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in given.items())
    return (
        markdown_table(["name", "over", "at slots", "R", "error less by, each layer"], rows)
        + "\nThe error is that of attention after the output projection, on texts held out of the training; "
        "`kvjax train_less --model MODEL --text FILES --out DIR` with:\n\n"
        + "".join(f"- {name}: `{command}`\n" for name, command in commands.items())
    )
