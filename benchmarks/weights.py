"""Time of a decode step with weights of 8 bits against those in float32: `kvjax bench weights --model smollm2`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cli.bench import say
from kvjax.cli.commands import Parser, finish
from kvjax.evaluation.bench import Contender, decoder, model_named, race
from kvjax.inference.decode import decode_step_in_place
from kvjax.inference.extend import prefill
from kvjax.model import Model
from kvjax.utils.markdown import markdown_table
from kvjax.utils.settings import whole_number

WEIGHTS: tuple[Literal["int8"] | None, ...] = (None, "int8")
WAYS = ("one at a time", "in one program")


def run(options: argparse.Namespace) -> None:
    """Measure what the command line names, and print a table.

    Raises:
        ValueError: a number is out of its range, or there is no such model.
    """
    counts = [whole_number("--rows", int(rows)) for rows in options.rows.split(",")]
    models = [model_named(options.model, "float32", None, weights) for weights in WEIGHTS]
    found: list[tuple[Any, ...]] = []
    for rows in counts:
        say(f"{rows} rows")
        tokens = np.random.default_rng(0).integers(3, models[0].config.vocab_size, (rows, options.prompt_tokens))
        contenders = [each for model in models for each in ways(model, tokens, options.new_tokens, options.repeats)]
        race(contenders, options.repeats)
        taken = [1e3 * min(contender.seconds) / options.new_tokens for contender in contenders]
        for way, whole, rounded in zip(WAYS, taken, taken[len(WAYS) :], strict=False):
            found.append((rows, way, whole, rounded, rounded / whole))
    table = markdown_table(("rows", "steps", "float32, ms", "int8, ms", "int8 / float32"), found)
    print(f"{models[0].name}, jax {jax.__version__}, least of {options.repeats}\n\n{table}")


def ways(model: Model, tokens: np.ndarray, steps: int, repeats: int) -> list[Contender]:
    """Return the contenders of one model, in the order of `WAYS`."""
    token = jnp.zeros(len(tokens), jnp.int32)
    state, _ = prefill(model, "full", tokens, max_new_tokens=steps * (repeats + 1))

    def alone() -> None:
        nonlocal state  # one text that continues from run to run
        for _ in range(steps):
            state, logits = decode_step_in_place(state, token)
            jax.block_until_ready(logits)

    together: Callable[[], Any] = decoder(model, "full", 1.0, tokens, steps).run
    return [Contender(way, "1.0", each) for way, each in zip(WAYS, (alone, together), strict=True)]


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = Parser(prog="kvjax bench weights", description=__doc__)
    options.add_argument("--model", default="smollm2", help="model to measure (default: %(default)s)")
    options.add_argument("--rows", default="1,4,5,8,16", help="rows of the batches (default: %(default)s)")
    options.add_argument("--prompt-tokens", type=int, default=100, help="tokens of a prompt (default: %(default)s)")
    options.add_argument("--new-tokens", type=int, default=8, help="steps of a run (default: %(default)s)")
    options.add_argument("--repeats", type=int, default=5, help="runs; the fastest counts (default: %(default)s)")
    return finish("bench weights", lambda: run(options.parse_args(argv)))
