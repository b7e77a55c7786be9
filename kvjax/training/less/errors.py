"""Errors of a policy without and with LESS kernels: measurements, a table, and loss curves."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Float

from kvjax.model import Model
from kvjax.training.less.loss import output_projections
from kvjax.training.less.recipe import Recipe
from kvjax.training.less.record import Features
from kvjax.training.less.train import OF_LAYERS, Training, mean_error, split_texts, training_mesh


def held_out_errors(
    model: Model, features: Features, training: Training, recipe: Recipe, dtype: DTypeLike, *, mesh: Mesh | None = None
) -> list[dict[str, Any]]:
    """Measure each layer's error on held-out texts, for the policy alone and with the kernels as stored in `dtype`."""
    held = split_texts(features.q.shape[1], recipe)[1]
    mesh = training_mesh(model.config, mesh)
    projection = jax.device_put(output_projections(model), NamedSharding(mesh, OF_LAYERS))
    rounded = jax.tree.map(lambda leaf: leaf.astype(dtype).astype(jnp.float32), training.best)
    before = mean_error(None, features, held, projection, recipe, mesh)
    after = mean_error(rounded, features, held, projection, recipe, mesh)
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
