"""Orbax checkpoints of weights, with each leaf under its own name."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax.models.checkpoints.tensors import Stored, Tensor
from kvjax.models.decoder import Weights
from kvjax.models.families import LoadError
from kvjax.models.weights import leaf_name
from kvjax.utils.files import check_tree, damage_named

_DAMAGED = "{} is damaged or not an Orbax checkpoint ({{reason}})."
_FORMER = (
    (re.compile(r"(layers\.\d+\.)(?=(gate|up|down)\.)"), r"\1mlp."),
    (re.compile(r"(layers\.\d+\.)(?=(query|key|value|output|query_norm|key_norm|sink_logits)\b)"), r"\1mixer."),
)
"""Patterns of the names of MLPs and of attention in checkpoints of kvjax 0.2, and their replacements."""


def write_orbax(weights: Weights, directory: Path) -> None:
    """Write weights to a directory that does not exist yet."""
    import orbax.checkpoint as ocp

    leaves = {leaf_name(path): leaf for path, leaf in jax.tree.leaves_with_path(weights)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory.absolute(), leaves)


def read_orbax(directory: Path) -> Stored:
    """Find the tensors in a directory that `write_orbax` wrote."""
    import orbax.checkpoint as ocp

    check_tree(directory, LoadError)
    with damage_named(_DAMAGED.format(directory), LoadError):
        with ocp.PyTreeCheckpointer() as checkpointer:
            arrays: dict[str, Any] = dict(checkpointer.metadata(directory.absolute()).item_metadata.tree)
        tensors: dict[str, Tensor] = {}
        for name, array in arrays.items():
            read, size = functools.partial(_read, directory, name), int(np.prod(array.shape)) * array.dtype.itemsize
            for pattern, replacement in _FORMER:
                name = pattern.sub(replacement, name)
            tensors[name] = Tensor(directory, tuple(array.shape), size, read)
    return Stored(directory, "config.json", tensors, ours=True)


def _read(directory: Path, name: str, dtype: np.dtype, sharding: jax.sharding.Sharding | None = None) -> Any:
    import orbax.checkpoint as ocp

    array_args = ocp.ArrayRestoreArgs(sharding=sharding, dtype=dtype)
    how = ocp.RestoreArgs(restore_type=np.ndarray) if sharding is None else array_args
    arguments = ocp.args.PyTreeRestore(item={name: 0}, restore_args={name: how}, partial_restore=True)
    with damage_named(_DAMAGED.format(directory), LoadError), ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(directory.absolute(), args=arguments)[name]
