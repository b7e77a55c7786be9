"""Resumable runs from texts to kernels on disk: collect features, train, measure, write."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from kvjax import methods
from kvjax.methods.less import checkpoint
from kvjax.model import Model
from kvjax.policies.policy import Policy
from kvjax.training import checkpoints
from kvjax.training.less.collect import check_policy, collect, sample_texts
from kvjax.training.less.errors import error_table, held_out_errors, write_losses
from kvjax.training.less.recipe import Recipe
from kvjax.training.less.train import check_batch, split_texts, train
from kvjax.utils.progress import Bar


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
        texts: UTF-8 files to train on.
        out: directory for the kernels; the run is in its `training`. An interrupted run continues there, and so does a
            run that ended with fewer epochs than the recipe's.
        mask: attention that the policy sees, see `record`.
        save_dtype: dtype of the kernels on disk.
        mesh: devices that train, see `training_mesh`; a run may continue on others. Texts are read on one device.
    """
    check_policy(policy, mask)
    split_texts(sequences, recipe)
    check_batch(recipe.batch, mesh)
    run, name = out / "training", methods.name_of(policy)
    if (out / "settings.json").exists() and not (run / "settings.json").exists():
        raise ValueError(f"{out} holds kernels without their training run; give another --out.")
    asked = {
        "model": checkpoint.fingerprint(model),
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
    checkpoints.open_run(run, asked, free=("epochs",))
    if (out / "settings.json").exists():
        made = checkpoint.read_settings(out).training
        if made["epochs"] >= recipe.epochs:
            print(error_table(made["errors"]))
            print(f"{out} already has these kernels, after {made['epochs']} epochs.")
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
    told: dict[str, Any] = {k: v for k, v in asked.items() if k not in ("model", "policy", "policy_settings")}
    settings = checkpoint.Settings(
        model=model.name,
        fingerprint=asked["model"],
        policy=name,
        policy_settings=asked["policy_settings"],
        budget=slots,
        features=recipe.features,
        hidden=recipe.hidden,
        literal=recipe.literal,
        training=told | {"errors": errors},
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
