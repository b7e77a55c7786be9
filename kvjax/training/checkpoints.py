"""Checkpoints of training runs, written atomically and tied to the run's settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.utils.files import check_tree, damage_named, read_json

T = TypeVar("T")

_SETTINGS = "settings.json"


def open_run(directory: Path, settings: dict[str, Any], free: Collection[str] = ()) -> None:
    """Write the settings of a new run, or check that they equal those of the run in the directory.

    A run that ended before it stored anything else is replaced.

    Args:
        settings: all settings that affect the result, in JSON types.
        free: names of settings that may change when a run continues.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / _SETTINGS
    settings = json.loads(json.dumps(settings))
    if not file.exists() or [*directory.iterdir()] == [file]:
        file.write_text(json.dumps(settings, indent=2) + "\n")
        return
    stored = read_json(file)
    for name in sorted({*stored, *settings} - {*free}):
        if stored.get(name) != settings.get(name):
            raise ValueError(
                f"{directory} holds a run with {name}={stored.get(name)!r}, this one has {settings.get(name)!r}: "
                "give the same settings or another --out."
            )


def _steps(directory: Path) -> list[int]:
    numbers = (path.name.removeprefix("step-") for path in directory.glob("step-*"))
    return sorted(int(number) for number in numbers if number.isdigit())


def newest_step(directory: Path) -> int:
    """Return the step of the newest checkpoint, 0 if there is none."""
    return max(_steps(directory), default=0)


def save_step(directory: Path, training: Any, step: int) -> None:
    """Save a checkpoint, unless the step has one, and delete older ones; a crash leaves a complete one in place."""
    import orbax.checkpoint as ocp

    target, aside = directory / f"step-{step}", directory / "writing"
    if target.exists():
        return
    shutil.rmtree(aside, ignore_errors=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(aside.absolute(), jax.tree.leaves(training))
    aside.replace(target)
    for old in _steps(directory)[:-1]:
        shutil.rmtree(directory / f"step-{old}")


def restore(directory: Path, like: T) -> T | None:
    """Restore the newest checkpoint; None if there is none.

    Args:
        like: pytree with the structure, shapes and dtypes of the checkpoint. Arrays committed to devices are restored
            with their sharding, even if they were saved with another one.
    """
    import orbax.checkpoint as ocp

    steps = _steps(directory)
    if not steps:
        return None
    step = directory / f"step-{steps[-1]}"
    check_tree(step)
    damage = f"{step} is damaged ({{reason}}); delete it, and the run goes on from the step before or the beginning."
    with damage_named(damage), ocp.StandardCheckpointer() as checkpointer:
        leaves, structure = jax.tree.flatten(like)
        # Uncommitted arrays are restored into host memory, because Orbax would choose devices for them.
        templates = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            if getattr(x, "committed", False)
            else np.empty(x.shape, x.dtype)
            for x in leaves
        ]
        leaves = checkpointer.restore(step.absolute(), templates)
        return jax.tree.unflatten(structure, [jnp.asarray(x) for x in leaves])
