"""Weights on a mesh of devices: which dimension of each leaf lies along which axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Weights
from kvjax.models.weights import leaf_name, weight_shapes

MESH_AXES = ("data", "model")
"""Rows of a batch lie along the first, heads and columns of the MLP along the second."""

RULES: Mapping[str, str] = {"vocab": "model", "heads": "model", "mlp": "model"}
"""The axis of a mesh for each logical axis that is spread; all others are whole on every device."""

AXES: Mapping[str, tuple[str | None, ...]] = {
    "embedding": ("vocab", None),
    "query.weight": ("heads", None),
    "query.bias": ("heads",),
    "key.weight": ("heads", None),
    "key.bias": ("heads",),
    "value.weight": ("heads", None),
    "value.bias": ("heads",),
    "output.weight": (None, "heads"),
    "gate.weight": ("mlp", None),
    "gate.bias": ("mlp",),
    "up.weight": ("mlp", None),
    "up.bias": ("mlp",),
    "down.weight": (None, "mlp"),
    "unembedding.weight": ("vocab", None),
    "unembedding.bias": ("vocab",),
}
"""The logical axes of each leaf, by the end of its name; leaves that are not here are whole on every device."""


def check_mesh(mesh: Mesh) -> None:
    """Refuse a mesh whose axes mean nothing here.

    Raises:
        ValueError: naming them.
    """
    if not set(mesh.axis_names) <= set(MESH_AXES):
        raise ValueError(f"a mesh with the axes {', '.join(mesh.axis_names)} is none of {' and '.join(MESH_AXES)}.")


def weight_shardings(config: ModelConfig, mesh: Mesh) -> Weights:
    """A sharding for each leaf of a model's weights.

    Query heads follow their KV heads; where a mesh does not divide the number of a layer's KV heads, or a width, what
    depends on it is whole on every device.

    Args:
        config: the model's shape.
        mesh: with axes of `MESH_AXES`.

    Raises:
        ValueError: the mesh has other axes.
    """
    check_mesh(mesh)

    def of(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        name = leaf_name(path)
        axes = next((axes for end, axes in AXES.items() if name == end or name.endswith(f".{end}")), ())
        parts = {"vocab": config.vocab_size, "mlp": config.mlp_width}
        if name.startswith("layers."):
            parts["heads"] = config.layer_configs[int(name.split(".")[1])].kv_heads

        def along(axis: str | None) -> str | None:
            spread = RULES.get(axis or "")
            return spread if spread in mesh.shape and parts[axis or ""] % mesh.shape[spread] == 0 else None

        return NamedSharding(mesh, PartitionSpec(*map(along, axes)))

    return jax.tree_util.tree_map_with_path(of, weight_shapes(config))
