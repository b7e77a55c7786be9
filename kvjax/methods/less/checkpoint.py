"""Checkpoints of trained kernels: an orbax checkpoint and its settings, which are checked when it is loaded."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.methods.less.feature_maps import Params, init_kernels
from kvjax.models.fingerprint import fingerprints
from kvjax.models.model import LanguageModel
from kvjax.utils.files import damage_named, expanded, read_json, restore_arrays
from kvjax.utils.settings import whole_number

_SETTINGS, _KERNELS = "settings.json", "kernels"
SHIPPED = Path(__file__).resolve().parents[2] / "tiny" / "less"
"""Directory of the embedded model's kernels, with one subdirectory for each base policy and budget."""
_MOST_FEATURES = 2**16
"""Maximal sizes of feature maps in a file of settings, which arrays are allocated for."""
_TYPES = {"model": str, "fingerprint": str, "policy": str, "policy_settings": dict, "training": dict}
_TYPES |= {"budget": int | float, "literal": bool, "dtype": str}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Model, policy and training that kernels were made for.

    Args:
        model: name of the model.
        fingerprint: hash of the model's shape and weights, the first of `fingerprints`.
        policy: registered name of the base policy.
        policy_settings: settings of the base policy.
        budget: slots, or fraction of the model's longest text, of the training; kernels may be used at other budgets.
        features, hidden, literal: as in `init_kernels`.
        training: further settings of the training.
        dtype: dtype of the kernels on disk, set by `save`.
    """

    model: str
    fingerprint: str
    policy: str
    policy_settings: dict[str, Any]
    budget: int | float
    features: int = 8
    hidden: int = 512
    literal: bool = False
    training: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: str = "float32"


def save(directory: str | Path, params: Params, settings: Settings, *, dtype: DTypeLike = jnp.float32) -> None:
    """Save kernels of all layers, stacked: write them to a temporary directory, then move them into place.

    Args:
        directory: target; kernels in it are replaced, other files stay.
        dtype: stored dtype; bfloat16 halves the bytes.
    """
    import orbax.checkpoint as ocp

    target = Path(directory).absolute()
    target.mkdir(parents=True, exist_ok=True)
    aside = target / "writing"
    shutil.rmtree(aside, ignore_errors=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(aside / _KERNELS, jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params))
    stored = dataclasses.asdict(settings) | {"dtype": jnp.dtype(dtype).name}
    (aside / _SETTINGS).write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    # A directory without settings counts as empty, so a crash never leaves a mix of old and new kernels.
    (target / _SETTINGS).unlink(missing_ok=True)
    shutil.rmtree(target / _KERNELS, ignore_errors=True)
    for name in (_KERNELS, _SETTINGS):
        (aside / name).replace(target / name)
    aside.rmdir()


def read_settings(directory: str | Path) -> Settings:
    """Read the settings of the kernels in a directory.

    Raises:
        ValueError: it holds no kernels, or the settings are damaged.
    """
    file = Path(directory) / _SETTINGS
    if not file.exists():
        raise ValueError(f"{directory} holds no kernels; give a directory of kvjax train_less.")
    stored = read_json(file)
    with damage_named(f"{file} is damaged ({{reason}}); copy it again or train other kernels with kvjax train_less."):
        settings = Settings(**stored)
        for name, kind in _TYPES.items():
            if not isinstance(value := getattr(settings, name), kind):
                raise TypeError(f"{name} is {value!r}")
        for name in ("features", "hidden"):
            whole_number(name, getattr(settings, name), 1, _MOST_FEATURES)
        if settings.dtype not in ("float32", "bfloat16", "float16", "float64"):
            raise ValueError(f"dtype is {settings.dtype!r}")
        return settings


def load(directory: str | Path, model: LanguageModel, policy: str) -> tuple[Params, Settings]:
    """Load kernels of all layers, stacked, in float32, for a model and a base policy.

    Args:
        policy: registered name of the base policy.

    Raises:
        ValueError: there are no kernels, they are damaged, or they were trained for another model, policy or shape.
    """
    settings, model_fingerprints = read_settings(directory), fingerprints(model)
    if settings.fingerprint not in model_fingerprints:
        raise ValueError(
            f"the kernels in {directory} were made for model {settings.model!r} ({settings.fingerprint}), not for "
            f"{model.name!r} ({model_fingerprints[0]}); train some for it with kvjax train_less."
        )
    if settings.policy != policy:
        raise ValueError(
            f"the kernels in {directory} were made for policy {settings.policy!r}, not for {policy!r}; "
            f"use base={settings.policy} or train some for it with kvjax train_less."
        )
    # Restore to host memory: orbax commits device arrays to their device, and every program that mixes them with
    # uncommitted arrays would be compiled again.
    sizes: dict[str, Any] = dict(features=settings.features, hidden=settings.hidden, literal=settings.literal)
    shapes = jax.eval_shape(lambda key: init_kernels(key, model.config, **sizes), jax.random.key(0))
    template = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(settings.dtype)), shapes)
    damage = f"the kernels in {directory} are damaged ({{reason}})."
    params = restore_arrays(Path(directory) / _KERNELS, template, damage)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params), settings


def find(checkpoint: str, policy: str) -> list[Path]:
    """Find the directories of kernels that a name stands for, from the smallest budget to the largest.

    Args:
        checkpoint: a directory, or the name of kernels in the package; empty for all kernels in the package for the
            policy.
        policy: registered name of the base policy.

    Raises:
        ValueError: there are none.
    """
    directory = expanded(checkpoint)
    if checkpoint and (directory / _SETTINGS).exists():
        return [directory]
    if checkpoint and (SHIPPED / checkpoint / _SETTINGS).exists():
        return [SHIPPED / checkpoint]
    shipped = sorted(path.parent for path in SHIPPED.glob(f"*/{_SETTINGS}"))
    names = ", ".join(path.name for path in shipped) or "none"
    if checkpoint:
        raise ValueError(f"{checkpoint} holds no kernels; give a directory of kvjax train_less or one of: {names}.")
    fitting = {path: settings.budget for path in shipped if (settings := read_settings(path)).policy == policy}
    if not fitting:
        raise ValueError(
            f"no kernels are shipped for policy {policy!r} (there are: {names}); train some with "
            "kvjax train_less and give checkpoint=DIR."
        )
    return sorted(fitting, key=lambda path: fitting[path])
