"""Train the embedded model.

`python -m experiments.tiny.train --text FILES --prepare DIR`, then `--data DIR --out DIR`.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import hashlib
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.tiny import network
from experiments.tiny.curriculum import Lessons
from experiments.tiny.recipe import RECIPES, Recipe
from experiments.tiny.tokenizer import prepare
from kvjax.cli.commands import Parser, finish, leave
from kvjax.training import checkpoints
from kvjax.utils.files import output_directory
from kvjax.utils.progress import Bar

Batch = tuple[np.ndarray, np.ndarray]


def batch_at(lessons: Lessons, recipe: Recipe, seed: int, step: int) -> Batch:
    """Return the data for the steps of one dispatch: ids [n, b, t + 1] and weights [n, b, t]."""
    stage, _ = stage_at(recipe, step)
    made = [lessons.batch(recipe.stages[stage], seed, step + i) for i in range(recipe.steps_per_dispatch)]
    return np.stack([ids for ids, _ in made]), np.stack([weights for _, weights in made])


def stage_at(recipe: Recipe, step: int) -> tuple[int, int]:
    """Return the stage of a step and the steps since that stage began."""
    for i, stage in enumerate(recipe.stages):
        if step < stage.steps:
            return i, step
        step -= stage.steps
    raise ValueError(f"Step {step} past the end of a recipe of {recipe.steps} steps.")


def rate_at(recipe: Recipe, step: int) -> float:
    """Return the learning rate: a ramp over the first steps, and within each stage the line of the recipe."""
    stage, since = stage_at(recipe, step)
    rates = recipe.rates or [*[(1.0, 1.0)] * (len(recipe.stages) - 1), (1.0, 0.05)]
    begin, end = rates[stage]
    share = begin + (end - begin) * since / recipe.stages[stage].steps
    return recipe.rate * min(1.0, (step + 1) / recipe.warmup) * share


@functools.cache  # each worker process builds its lessons once
def _lessons(directory: Path, shares: tuple[float, ...]) -> Lessons:
    return Lessons(directory, shares)


def _work(directory: Path, recipe: Recipe, seed: int, step: int) -> Batch:
    return batch_at(_lessons(directory, recipe.shares), recipe, seed, step)


def batches(directory: Path, recipe: Recipe, seed: int, steps: range, workers: int) -> Iterator[Batch]:
    """Yield batches of these steps in order, from worker processes, or from this process without workers."""
    if not workers:
        lessons = Lessons(directory, recipe.shares)
        yield from (batch_at(lessons, recipe, seed, step) for step in steps)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"))
    try:
        ahead: collections.deque[Future[Batch]] = collections.deque()
        for step in steps:
            ahead.append(pool.submit(_work, directory, recipe, seed, step))
            if len(ahead) > 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def choose_attention() -> network.Causal:
    """Return cuDNN's fused attention if this machine has it, else einsum; print the choice."""
    if jax.default_backend() == "gpu":
        q, k = jnp.ones((1, 2, 2, 64, 32), jnp.bfloat16), jnp.ones((1, 2, 64, 32), jnp.bfloat16)
        try:
            jax.block_until_ready(
                jax.jit(jax.grad(lambda q: network.cudnn_causal(q, k, k).astype(jnp.float32).sum()))(q)
            )
            return network.cudnn_causal
        except Exception as error:  # any error of cuDNN means that einsum is used
            print(f"cuDNN attention does not work here, using einsum: {str(error)[:200]}", flush=True)
    return network.xla_causal


def train(
    data: Path,
    out: Path,
    recipe: Recipe,
    seed: int = 0,
    steps: int | None = None,
    minutes: float | None = None,
    workers: int = 0,
    save_every: float = 120.0,
    anneal: bool = False,
) -> network.Training:
    """Train, or continue a training, and write a checkpoint to `out`.

    Args:
        data: directory written by `prepare`.
        out: directory of the run; continued if it holds one with the same settings.
        recipe: model and lessons.
        seed: seed of the weights and the lessons.
        steps: stop once this many steps have been taken since the very first, counted in whole dispatches.
        minutes: stop after this long.
        workers: processes that make batches; 0 makes them here.
        save_every: seconds between checkpoints.
        anneal: continue with the last stage immediately, and skip the rest of the others.

    Raises:
        ValueError: `out` holds a run with other settings.
    """
    began = time.monotonic()
    digest = hashlib.sha256((data / "tokens.npz").read_bytes()).hexdigest()[:16]
    checkpoints.open_run(out, {**dataclasses.asdict(recipe), "seed": seed, "data": digest})
    training = network.start(recipe.model, seed)
    training = checkpoints.restore(out, training) or training
    first, n = int(training.step), recipe.steps_per_dispatch
    if anneal:
        first = max(first, recipe.steps - recipe.stages[-1].steps)
        training = training.replace(step=jnp.asarray(first, jnp.int32))  # type: ignore[attr-defined]
    last = min(recipe.steps, recipe.steps if steps is None else -(-steps // n) * n)
    causal, dtype = choose_attention(), "bfloat16" if jax.default_backend() == "gpu" else "float32"
    step, saved, tokens, since, stage = first, began, 0, time.monotonic(), -1
    pending: tuple[str, dict[str, jax.Array]] | None = None
    forced = False
    with Bar("steps", last, first) as bar:
        for ids, weights in batches(data, recipe, seed, range(first, last, n), workers):
            now, _ = stage_at(recipe, step)
            if now != stage:
                stage, forced = now, True
            rates = jnp.asarray([rate_at(recipe, step + i) for i in range(n)], jnp.float32)
            training, seen = network.train_steps(
                training, ids, weights, rates, recipe.model, recipe.weight_decay, dtype, causal
            )
            step += n
            if pending is not None:  # read the previous dispatch's numbers while this one runs
                name, numbers = pending
                said = {key: float(value[-1]) for key, value in numbers.items()}
                if not np.isfinite(said["loss"]):
                    raise FloatingPointError(f"The loss became {said['loss']} before step {step}.")
                speed = tokens / (time.monotonic() - since)
                line = f"{name}: loss {said['loss']:.3f} text {said['text']:.3f} recalled {said['recalled']:.1%}"
                bar.update(step - n, f"{line} {speed:,.0f} tokens/s {time.monotonic() - began:.0f} s", forced)
                if forced:  # a program was just compiled: restart the clock
                    tokens, since, forced = 0, time.monotonic(), False
            pending, tokens = (recipe.stages[stage].name, seen), tokens + weights.size
            if time.monotonic() - saved > save_every:
                checkpoints.save_step(out, training, step)
                saved = time.monotonic()
            if minutes is not None and time.monotonic() - began > 60 * minutes:
                break
    checkpoints.save_step(out, training, step)
    print(f"stopped after step {step} of {recipe.steps}, {time.monotonic() - began:.0f} s", flush=True)
    return training


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    parser = Parser(prog="python -m experiments.tiny.train", description=__doc__)
    parser.add_argument("--text", type=Path, nargs="+", help="UTF-8 texts to train on")
    parser.add_argument("--valid", type=Path, nargs="+", default=[], help="UTF-8 texts to report losses on")
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="only prepare the data, into this directory")
    parser.add_argument("--data", type=Path, metavar="DIR", help="prepared data; with --text default OUT/data")
    parser.add_argument(
        "--out", type=output_directory, metavar="DIR", help="the run's directory; continued if it holds one"
    )
    parser.add_argument("--recipe", choices=RECIPES, default="cpu", help="cpu for a CPU, base for a GPU")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the steps of all but the copying lessons")
    parser.add_argument("--minutes", type=float, help="stop after this long, resumably")
    parser.add_argument("--steps", type=int, help="stop after this many steps in all, resumably")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="processes that make batches")
    parser.add_argument("--anneal", action="store_true", help="go to the last stage at once")
    parser.add_argument("--resume", action="store_true", help="fail unless OUT holds a run to continue")
    parser.add_argument("--require-gpu", action="store_true", help="exit at once where JAX sees no GPU")
    options = parser.parse_args(argv)
    return finish("train_tiny", lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Run the command with its options.

    Raises:
        ValueError: the options do not fit together, or files are missing or unfit.
    """
    if options.require_gpu and jax.default_backend() != "gpu":
        raise ValueError(f"--require-gpu, but JAX runs on {jax.default_backend()}: install a CUDA build of JAX.")
    recipe = RECIPES[options.recipe].scaled(options.scale)
    if not (options.prepare or options.out):
        raise ValueError("Nothing to do: give --out DIR to train or --prepare DIR to prepare data.")
    if not (options.text or options.data):
        raise ValueError("No data: give --text FILES, or --data DIR with data prepared before.")
    data = options.data or options.prepare or options.out / "data"
    if options.text and not (data / "data.json").exists():
        for path in (*options.text, *options.valid):
            if not path.is_file():
                raise ValueError(f"{path} is not a file: give text files.")
        print(prepare(options.text, options.valid, data, recipe.model.vocab_size), flush=True)
    if options.prepare:
        return
    if options.resume and not (options.out / "settings.json").exists():
        raise ValueError(f"{options.out} holds no run to resume: leave out --resume or give its directory.")
    train(
        data,
        options.out,
        recipe,
        options.seed,
        options.steps,
        options.minutes,
        options.workers,
        120,
        options.anneal,
    )


if __name__ == "__main__":
    leave(main())
