"""Residuals at equal bytes: `python -m experiments.residuals --model tiny --text FILE`."""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

from experiments.claims import markdown_table
from experiments.runs import Run, Runs
from experiments.store import Store
from kvjax.cache.buffers import allocated_bytes, slot_bytes
from kvjax.evaluation.perplexity import begin
from kvjax.evaluation.summary import paired
from kvjax.evaluation.texts import passages
from kvjax.methods.notation import combination
from kvjax.model import Model, load
from kvjax.policies.policy import Policy
from kvjax.utils.files import output_directory, write_text


def bytes_of(model: Model, policy: Policy | str, slots: int) -> int:
    """Return the bytes of a text's cache with this number of slots per head, and of its residual's state."""
    cache = begin(model, policy, 1, slots, slots).cache
    return sum(
        slots * view.position.shape[1] * slot_bytes(view) + allocated_bytes(view.state.residual) for view in cache.slots
    )


def slots_within(model: Model, policy: Policy, limit: float) -> int:
    """Return the most slots per head with which a policy's cache of one text takes no more bytes.

    Args:
        model: whose cache it is.
        policy: with its residual, whose state counts.
        limit: bytes.

    Raises:
        ValueError: the residual alone takes more.
    """
    few, more = (bytes_of(model, policy, slots) for slots in (16, 17))
    slots = 16 + int((limit - few) // (more - few))
    if slots < 1:
        raise ValueError(f"{policy.name} with its residual takes more than {limit:.0f} bytes; give larger shares.")
    return slots


def main(argv: list[str] | None = None) -> int:
    """Measure what is missing, and write the page; a run that is cut off goes on where it stopped."""
    options = _parser().parse_args(argv)
    model = load(options.model, "float32")
    read = passages(model, options.text, options.rows, options.length)
    folder = options.out / "residuals"
    store = Store(folder / "measurements.json", False, lambda line: print(line, file=sys.stderr))
    runs = Runs(model, read, store, (), folder, options.prompt)
    whole = runs.run("full", combination("full"))
    assert whole is not None
    size = bytes_of(model, "full", options.length)
    text = [
        f"# Residuals at equal bytes on {options.model}",
        f"Passages of {options.length} tokens, {options.rows} of each text, in float32: a prompt of {options.prompt} "
        "tokens, and the others read token by token with eviction. For each share of the full cache's bytes, "
        f"`{options.base}` has as many slots as fit beside the state of a residual. Nats are per token after the "
        "prompt; `less by` is the reduction by a residual, its mean over passages ± standard error. Bytes are those "
        "of slots in use and of the state. Weights of LESS's kernels, which all texts share, are not counted. Made by "
        f"`python -m experiments.residuals --model {options.model} --text "
        f"{' '.join(file.name for file in options.text)} --rows {options.rows} --length {options.length} --prompt "
        f"{options.prompt} --shares {options.shares} --base {options.base}`.",
    ]
    rows: list[list[Any]] = [["all", "full", None, "100%", *_numbers(runs, whole, None)]]
    for share in map(float, options.shares.split(",")):
        base = None
        for residual in ("", *options.residuals):
            name = f"{options.base}+{residual}" if residual else options.base
            policy = combination(name)
            slots = slots_within(model, policy, share * size)
            run = runs.run(name, policy, slots)
            assert run is not None
            base = base or run
            taken = 100 * bytes_of(model, policy, slots) / size
            rows.append([f"{100 * share:g}%", name, slots, f"{taken:.2f}%", *_numbers(runs, run, base)])
    of_texts = itertools.chain(*([f"{name}: nats", f"{name}: less by"] for name in runs.texts))
    text.append(markdown_table(["bytes", "policy", "slots", "taken", *of_texts], rows))
    write_text(options.out / "residuals.md", "\n\n".join(text))
    return 0


def _numbers(runs: Runs, run: Run, base: Run | None) -> list[Any]:
    numbers: list[Any] = []
    for text in runs.texts:
        numbers.append(run.nats(text))
        if base is None or base is run:
            numbers.append(None)
        else:
            mean, error = paired(base.rows(text), run.rows(text))
            numbers.append(f"{mean:+.4f} ± {error:.4f}")
    return numbers


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.residuals", description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="held-out texts")
    parser.add_argument("--base", default="h2o", help="policy that evicts (default: h2o)")
    parser.add_argument("--residuals", nargs="+", default=["less", "momentkv", "attention_matching"])
    parser.add_argument("--shares", default="0.05,0.1,0.2", help="of the full cache's bytes (default: 0.05,0.1,0.2)")
    parser.add_argument("--rows", type=int, default=16, help="passages of each text (default: 16)")
    parser.add_argument("--length", type=int, default=768, help="tokens of a passage (default: 768)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens read whole before the rest (default: 512)")
    parser.add_argument("--out", type=output_directory, default="docs/results")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
