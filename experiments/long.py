"""Text far beyond the trained length on a fixed cache: `kvjax evaluate long`."""

from __future__ import annotations

import argparse

import numpy as np

from experiments.store import open_store
from kvjax.cli.options import add_policies, parts_of
from kvjax.evaluation.perplexity import perplexity
from kvjax.evaluation.texts import passages
from kvjax.methods.notation import compared
from kvjax.models.fingerprint import fingerprint
from kvjax.policies.policy import Policy
from kvjax.utils.files import write_text
from kvjax.utils.markdown import markdown_table
from kvjax.utils.settings import parse_budget


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of the report."""
    add_policies(parser, "streaming,lambda_mask,window")
    parser.add_argument("--budget", default="256", help="slots per head")
    parser.add_argument("--window", type=int, default=1000, help="tokens whose mean makes one row of the table")
    parser.set_defaults(rows=1, length=20_001)


def run(options: argparse.Namespace) -> None:
    """Read texts token by token, and write `long.md`: nats per token in successive windows.

    Raises:
        ValueError: a text, a policy or a setting does not fit.
    """
    from kvjax.model import load

    if options.window < 1:
        raise ValueError(f"window={options.window} is not a number of tokens from 1.")
    chosen, budget = compared(options.policies, *parts_of(options)), parse_budget(options.budget)
    model = load(options.model, "float32", options.revision, mesh=options.mesh)
    read = passages(model, options.text, options.rows, options.length)
    store = open_store(options, "long")
    settings = {"model": fingerprint(model), "text": read.digest, "budget": budget, "window": options.window}
    text = [
        "# Beyond the trained length",
        f"Nats per token of held-out text, read token by token on {budget} slots per head and averaged over windows of "
        f"{options.window:,} tokens. The model was trained on {model.config.max_positions:,} positions. "
        f"Made by `{options.command}`.",
    ]
    columns = {}
    for name, policy in chosen.items():

        def measure(policy: Policy = policy) -> dict[str, list[float]]:
            nats = perplexity(model, policy, read.tokens, budget).nats
            return {file: in_windows(nats[rows], options.window).tolist() for file, rows in read.rows.items()}

        columns[name] = store.measure(name, settings, measure)
    for file in read.rows:
        means = [columns[name][file] for name in chosen]
        starts = range(0, options.window * len(means[0]), options.window)
        rows = [
            [f"{start + 1:,} to {min(start + options.window, read.tokens.shape[1] - 1):,}", *(f"{m:.3f}" for m in row)]
            for start, row in zip(starts, zip(*means, strict=True), strict=True)
        ]
        text += [f"## {file}", markdown_table(["tokens", *(f"`{name}`" for name in chosen)], rows).strip()]
    report = "\n\n".join(text) + "\n"
    write_text(options.out / "long.md", report)
    print(report)


def in_windows(nats: np.ndarray, window: int) -> np.ndarray:
    """Return means [n] of nats [b, m] over all rows and successive windows; the last window may be shorter."""
    starts = range(0, nats.shape[1], window)
    return np.array([nats[:, start : start + window].mean() for start in starts])
