"""Reading of Orbax checkpoints that may be damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax.utils.files import check_tree, damage_named


def restore_arrays(directory: Path, like: Any, sentence: str) -> Any:
    """Restore a tree of arrays into host memory.

    Arrays are read one after the other. If one fails while others are being read, threads of Orbax print errors.

    Args:
        like: tree of the arrays' shapes and dtypes.
        sentence: error for a damaged checkpoint, with `{reason}`; see `damage_named`.
    """
    import orbax.checkpoint as ocp

    check_tree(directory)
    leaves, structure = jax.tree.flatten(like)
    arrays: list[np.ndarray] = []
    with damage_named(sentence), ocp.PyTreeCheckpointer() as checkpointer:
        for index, leaf in enumerate(leaves):
            chosen: list[Any] = [ocp.PLACEHOLDER] * len(leaves)
            chosen[index] = 0
            arguments = ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
            read = ocp.args.PyTreeRestore(
                item=structure.unflatten(chosen), restore_args=structure.unflatten([arguments] * len(leaves))
            )
            array = jax.tree.leaves(checkpointer.restore(directory.absolute(), args=read))[index]
            if array.shape != leaf.shape:
                raise ValueError(f"an array has shape {list(array.shape)}, not {list(leaf.shape)}")
            arrays.append(array)
    return structure.unflatten(arrays)
