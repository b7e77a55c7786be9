"""Resumable runs from texts to kernels on disk: collect features, train, measure, write."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Float

from kvjax import methods
from kvjax.methods.less import checkpoint
from kvjax.model import Model
from kvjax.models.fingerprint import fingerprint, fingerprints
from kvjax.policies.policy import Policy
from kvjax.training import checkpoints
from kvjax.training.less.loss import output_projections
from kvjax.training.less.recipe import Recipe
from kvjax.training.less.record import Features, check_trainable, collect, sample_texts
from kvjax.training.less.train import OF_LAYERS, Training, check_batch, mean_error, split_texts, train, training_mesh
from kvjax.utils.modes import on_the_host
from kvjax.utils.progress import Bar


@on_the_host
def train_kernels(
    model: Model,
    policy: Policy,
    slots: int,
    texts: list[Path],
    out: Path,
    recipe: Recipe,
    *,
    sequences: int = 256,
    length: int = 1024,
    plan: str | None = None,
    mask: str = "decode",
    save_dtype: str = "float32",
    keep_features: bool = False,
    mesh: Mesh | None = None,
) -> None:
    """Train kernels, write them with their losses, and print the errors without and with them.

    Args:
        out: directory for the kernels; the run is in its `training`. An interrupted run continues there, and so does a
            run that ended with fewer epochs than the recipe's.
        mask: attention that the policy sees, see `record`.
        mesh: devices that train, see `training_mesh`; a run may continue on others. Texts are read on one device.
    """
    check_trainable(policy, mask)
    split_texts(sequences, recipe)
    check_batch(recipe.batch, mesh)
    run, name = out / "training", methods.name_of(policy)
    if (out / "settings.json").exists() and not (run / "settings.json").exists():
        raise ValueError(f"{out} holds kernels without their training run; give another --out.")
    run_settings = {
        "model": fingerprint(model),
        "dtype": str(model.weights.dtype),
        "policy": name,
        "policy_settings": methods.settings_in(policy),
        "slots": slots,
        "plan": plan,
        "mask": mask,
        "sequences": sequences,
        "length": length,
        "texts": {file.name: _digest(file) for file in texts},
        "save_dtype": save_dtype,
        **dataclasses.asdict(recipe),
    }
    checkpoints.open_run(run, run_settings, free=("epochs",))
    if (out / "settings.json").exists():
        previous = checkpoint.read_settings(out).training
        if previous["epochs"] >= recipe.epochs:
            print(error_table(previous["errors"]))
            print(f"{out} already has these kernels, after {previous['epochs']} epochs.")
            return
    began = time.monotonic()
    tokens = sample_texts(model, texts, sequences, length, recipe.seed)
    print(f"{name} with {slots} of {length} slots, {len(tokens)} texts", flush=True)
    with Bar("texts", len(tokens)) as bar:
        features = collect(
            model,
            policy,
            slots,
            tokens,
            run / "features",
            plan=plan,
            mask=mask,
            seed=recipe.seed,
            show=lambda done: bar.update(done, "texts read"),
        )
    with Bar("epochs", recipe.epochs, checkpoints.newest_step(run)) as bar:

        def show(epoch: int, losses: Float[np.ndarray, "L 2"]) -> None:
            numbers = " ".join(f"{loss:.3g}" for loss in losses[:, 1])
            bar.update(epoch, f"epochs, held-out error by layer {numbers}, {time.monotonic() - began:.0f} s")

        training = train(model, features, run, recipe, mesh=mesh, show=show)
    stored = jnp.dtype(save_dtype)
    errors = held_out_errors(model, features, training, recipe, stored, mesh=mesh)
    record: dict[str, Any] = {k: v for k, v in run_settings.items() if k not in ("model", "policy", "policy_settings")}
    shared: dict[str, Any] = {key: run_settings[key] for key in ("policy_settings", "features", "hidden", "literal")}
    settings = checkpoint.Settings(
        model=model.name,
        fingerprint=fingerprints(model)[0],
        policy=name,
        budget=slots,
        training=record | {"errors": errors},
        **shared,
    )
    checkpoint.save(out, training.best, settings, dtype=stored)
    write_losses(out, np.asarray(training.losses))
    if not keep_features:
        shutil.rmtree(run / "features")
    print(error_table(errors))
    print(f"{out}: kernels for {name}, {time.monotonic() - began:.0f} s")


def _digest(file: Path) -> str:
    if not file.is_file():
        raise ValueError(f"{file} is not a file; give a text file.")
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:16]


def held_out_errors(
    model: Model, features: Features, training: Training, recipe: Recipe, dtype: DTypeLike, *, mesh: Mesh | None = None
) -> list[dict[str, Any]]:
    """Measure each layer's error on held-out texts, for the policy alone and with the kernels as stored in `dtype`."""
    held_out = split_texts(features.q.shape[1], recipe)[1]
    mesh = training_mesh(model.config, mesh)
    projection = jax.device_put(output_projections(model), NamedSharding(mesh, OF_LAYERS))
    rounded = jax.tree.map(lambda leaf: leaf.astype(dtype).astype(jnp.float32), training.best)
    before, after = (mean_error(x, features, held_out, projection, recipe, mesh) for x in (None, rounded))
    best = np.argmin(np.asarray(training.losses)[:, :, 1], axis=1) + 1
    return [
        {"layer": layer, "before": float(before[layer]), "after": float(after[layer]), "best_epoch": int(best[layer])}
        for layer in range(len(before))
    ]


def error_table(errors: list[dict[str, Any]]) -> str:
    """Format each layer's error without and with the kernels as text."""
    lines = [f"{'layer':>5} {'policy alone':>14} {'with LESS':>14} {'less by':>8} {'best epoch':>11}"]
    for row in errors:
        share = 1 - row["after"] / row["before"] if row["before"] else 0.0
        lines.append(
            f"{row['layer']:>5} {row['before']:>14.4g} {row['after']:>14.4g} {share:>8.1%} {row['best_epoch']:>11}"
        )
    return "\n".join(["mean squared error after the output projection, held-out texts", *lines])


def write_losses(directory: Path, losses: Float[np.ndarray, "L epochs 2"]) -> None:
    """Write the losses to losses.csv and, if matplotlib is installed, losses.png."""
    with (directory / "losses.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["layer", "epoch", "training", "held_out"])
        for layer, epochs in enumerate(losses):
            writer.writerows([layer, epoch, *map(float, pair)] for epoch, pair in enumerate(epochs, 1))
    try:
        from matplotlib.figure import Figure  # not pyplot, whose backend is the user's
    except ImportError:
        print("no losses.png: matplotlib is not installed.", file=sys.stderr)
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for layer, epochs in enumerate(losses):
        (line,) = axes.plot(np.arange(1, len(epochs) + 1), epochs[:, 1], label=f"layer {layer}")
        axes.plot(np.arange(1, len(epochs) + 1), epochs[:, 0], ":", color=line.get_color())
    axes.set(yscale="log", xlabel="epoch", ylabel="mean squared error", title="held-out texts; dotted: training")
    axes.legend()
    figure.savefig(directory / "losses.png", dpi=120)
