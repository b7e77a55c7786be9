"""Train LESS kernels for a model, a policy and a budget: `python -m kvjax.train_less`.

The commands that made the kernels of the embedded model are in kvjax/tiny/less/README.md.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import hashlib
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import policies
from kvjax.commands import finish, use_compilation_cache
from kvjax.settings import parse_budget, parse_settings

if TYPE_CHECKING:
    from kvjax.less.train import Recipe, Training
    from kvjax.models import Model
    from kvjax.policies.base import Policy


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    options = argparse.ArgumentParser(
        prog="kvjax train_less", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    options.add_argument("--model", default="tiny", help="tiny (embedded), a directory, or a hub id")
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model")
    options.add_argument("--policy", default="h2o", help="the policy that evicts (default: h2o)")
    options.add_argument("--set", nargs="+", action="extend", default=[], metavar="key=value", dest="settings")
    options.add_argument("--budget", default="0.05", help="slots per head, or a fraction of the model's longest text")
    options.add_argument("--plan", help="how the budget is spread over layers")
    options.add_argument("--text", type=Path, nargs="+", required=True, help="UTF-8 texts to learn from")
    options.add_argument("--out", type=Path, required=True, metavar="DIR", help="gets the kernels; continued if begun")
    options.add_argument("--sequences", type=int, default=256, help="passages of the texts (default: 256)")
    options.add_argument("--length", type=int, help="tokens of each (default: the model's longest, at most 4096)")
    options.add_argument("--mask", choices=("decode", "full-softmax"), default="decode", help="what the policy sees")
    options.add_argument("--features", type=int, default=8, help="R (default: 8)")
    options.add_argument("--hidden", type=int, default=512, help="R' (default: 512)")
    options.add_argument("--literal", action="store_true", help="equation 2 as it is printed")
    options.add_argument("--dropout", type=float, default=0.3)
    options.add_argument("--epochs", type=int, default=40)
    options.add_argument("--batch", type=int, default=2, help="passages per step (default: 2)")
    options.add_argument("--rate", type=float, default=1e-3, help="Adam's, at first (default: 1e-3)")
    options.add_argument("--halve-every", type=int, default=10, metavar="EPOCHS", help="(default: 10)")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--save-dtype", choices=("float32", "bfloat16"), default="float32", help="of the kernels")
    options.add_argument("--keep-features", action="store_true", help="do not delete what was collected at the end")
    return options


def slots_of(budget: int | float, model: Model) -> int:
    """A budget in slots; a fraction is one of the model's longest text, rounded down to an even number (Table 1).

    Raises:
        ValueError: it is not positive, or a fraction above 1.
    """
    if (isinstance(budget, float) and not 0 < budget <= 1) or budget <= 0:
        raise ValueError(f"budget={budget} is not a fraction in (0.0, 1.0], nor a whole number of slots.")
    return budget if isinstance(budget, int) else max(2, 2 * int(budget * model.config.max_positions / 2 + 1e-9))


def run(options: argparse.Namespace) -> None:
    """What the command line asks for.

    Raises:
        ValueError: it asks for something that cannot be, said in one sentence.
    """
    from kvjax.less import checkpoint
    from kvjax.less.collect import check_policy, collect, sample_texts
    from kvjax.less.train import Recipe, split_texts, train
    from kvjax.models import load
    from kvjax.tiny import checkpoint as runs
    from kvjax.tiny.train import Progress

    names = {field.name for field in dataclasses.fields(Recipe)}
    recipe = Recipe(**{name: value for name, value in vars(options).items() if name in names})
    policy = policies.policy(options.policy, **parse_settings(options.settings))
    check_policy(policy, options.mask)
    split_texts(options.sequences, recipe)
    model = load(options.model, dtype=options.dtype)
    budget = parse_budget(options.budget)
    slots, length = slots_of(budget, model), options.length or min(4096, model.config.max_positions)
    work = options.out / "training"
    if (options.out / "settings.json").exists() and not (work / "settings.json").exists():
        raise ValueError(f"{options.out} holds kernels of which the run is gone; give another --out.")
    asked = {
        "model": checkpoint.fingerprint(model),
        "dtype": options.dtype,
        "policy": options.policy,
        "policy_settings": _settings_of(policy),
        "slots": slots,
        "plan": options.plan,
        "mask": options.mask,
        "sequences": options.sequences,
        "length": length,
        "texts": {file.name: _digest(file) for file in options.text},
        "save_dtype": options.save_dtype,
        **dataclasses.asdict(recipe),
    }
    runs.claim(work, asked)
    if (options.out / "settings.json").exists():
        print(table(checkpoint.read_settings(options.out).training["errors"]))
        print(f"{options.out} holds these kernels already.")
        return
    began = time.monotonic()
    tokens = sample_texts(model, options.text, options.sequences, length, recipe.seed)
    print(f"{options.policy} with {slots} of {length} slots, {len(tokens)} texts", flush=True)
    progress = Progress(len(tokens), 0)
    try:
        features = collect(
            model,
            policy,
            slots,
            tokens,
            work / "features",
            plan=options.plan,
            mask=options.mask,
            seed=recipe.seed,
            show=lambda done: progress.show(done, "texts read"),
        )
    finally:
        progress.close()
    progress = Progress(recipe.epochs, 0)

    def show(epoch: int, losses: np.ndarray) -> None:
        numbers = " ".join(f"{loss:.3g}" for loss in losses[:, 1])
        progress.show(epoch, f"epochs, held-out error by layer {numbers}, {time.monotonic() - began:.0f} s")

    try:
        training = train(model, features, work, recipe, show=show)
    finally:
        progress.close()
    stored = jnp.dtype(options.save_dtype)
    errors = _measure(model, features, training, recipe, stored)
    settings = checkpoint.Settings(
        model=model.name,
        fingerprint=asked["model"],
        policy=options.policy,
        policy_settings=asked["policy_settings"],
        budget=slots,
        features=recipe.features,
        hidden=recipe.hidden,
        literal=recipe.literal,
        training={name: value for name, value in asked.items() if name not in ("model", "policy", "policy_settings")}
        | {"errors": errors},
    )
    checkpoint.save(options.out, training.best, settings, dtype=stored)
    write_losses(options.out, np.asarray(training.losses))
    if not options.keep_features:
        shutil.rmtree(work / "features")
    print(table(errors))
    print(f"{options.out}: kernels for --policy less --set base={options.policy}, {time.monotonic() - began:.0f} s")


def _settings_of(policy: Policy) -> dict[str, Any]:
    return {name: getattr(policy, name) for name in type(policy).settings()}


def _digest(file: Path) -> str:
    if not file.is_file():
        raise ValueError(f"{file} is not a file; give text files.")
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:16]


def _measure(model: Model, features: Any, training: Training, recipe: Recipe, dtype: Any) -> list[dict[str, Any]]:
    """Errors on held-out texts by layer: of the policy alone, and with the kernels as they are stored."""
    from kvjax.less.train import layer_mesh, mean_error, output_projections, split_texts

    held = split_texts(features.q.shape[1], recipe)[1]
    mesh, projection = layer_mesh(model.config.layers), output_projections(model)
    rounded = jax.tree.map(lambda leaf: leaf.astype(dtype).astype(jnp.float32), training.best)
    before = mean_error(None, features, held, projection, recipe, mesh)
    after = mean_error(rounded, features, held, projection, recipe, mesh)
    best = np.argmin(np.asarray(training.losses)[:, :, 1], axis=1) + 1
    return [
        {"layer": layer, "before": float(before[layer]), "after": float(after[layer]), "best_epoch": int(best[layer])}
        for layer in range(len(before))
    ]


def table(errors: list[dict[str, Any]]) -> str:
    """Residual error of each layer, before and after, as text."""
    lines = [f"{'layer':>5} {'policy alone':>14} {'with LESS':>14} {'less by':>8} {'best epoch':>11}"]
    for row in errors:
        share = 1 - row["after"] / row["before"] if row["before"] else 0.0
        lines.append(
            f"{row['layer']:>5} {row['before']:>14.4g} {row['after']:>14.4g} {share:>8.1%} {row['best_epoch']:>11}"
        )
    return "\n".join(["mean squared error after the output projection, held-out texts", *lines])


def write_losses(directory: Path, losses: np.ndarray) -> None:
    """The losses [L, epochs, 2] as losses.csv and, where matplotlib is installed, losses.png."""
    with (directory / "losses.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["layer", "epoch", "training", "held_out"])
        for layer, epochs in enumerate(losses):
            writer.writerows([layer, epoch, *map(float, pair)] for epoch, pair in enumerate(epochs, 1))
    try:
        import matplotlib
    except ImportError:
        print("no losses.png: matplotlib is not installed.", file=sys.stderr)
        return
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for layer, epochs in enumerate(losses):
        (line,) = axes.plot(np.arange(1, len(epochs) + 1), epochs[:, 1], label=f"layer {layer}")
        axes.plot(np.arange(1, len(epochs) + 1), epochs[:, 0], ":", color=line.get_color())
    axes.set(yscale="log", xlabel="epoch", ylabel="mean squared error", title="held-out texts; dotted: training")
    axes.legend()
    figure.savefig(directory / "losses.png", dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns its exit code."""
    options = parser().parse_args(argv)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # tokenizers need no torch
    use_compilation_cache()
    return finish("train_less", lambda: run(options))


if __name__ == "__main__":
    raise SystemExit(main())
