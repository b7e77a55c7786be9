"""A model on a mesh of devices: which dimension of each leaf lies along which axis, and what one device knows of it."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Weights
from kvjax.models.weights import leaf_name, weight_shapes
from kvjax.types import HEADS, ROWS, SLOTS, PyTree, Spread

MESH_AXES = ("data", "model", "slots")
"""Rows of a batch lie along the first, heads and columns of the MLP along the second.

Along the third, too, lie columns of the MLP, but of heads their slots alone.
"""

RULES: Mapping[str, tuple[str, ...]] = {
    "heads": (HEADS,),
    "attended": (HEADS, SLOTS),
    "mlp": (HEADS, SLOTS),
    "vocab": (HEADS, SLOTS),
}
"""The axes of a program's mesh for each logical axis that is spread; all others are whole on every device."""

AXES: Mapping[str, tuple[str | None, ...]] = {
    "embedding": ("vocab", None),
    "query.weight": ("heads", None),
    "key.weight": ("heads", None),
    "value.weight": ("heads", None),
    "output.weight": (None, "attended"),
    "gate.weight": ("mlp", None),
    "up.weight": ("mlp", None),
    "down.weight": (None, "mlp"),
    "unembedding.weight": ("vocab", None),
}
"""The logical axes of each leaf, by the end of its name; leaves that are not here are whole on every device.

Biases and scales of linear maps lie as the first axis of their weights does.
"""


def check_mesh(mesh: Mesh) -> None:
    """Refuse a mesh whose axes mean nothing here.

    Raises:
        ValueError: naming them.
    """
    if not set(mesh.axis_names) <= set(MESH_AXES):
        raise ValueError(f"a mesh with the axes {', '.join(mesh.axis_names)} is none of {', '.join(MESH_AXES)}.")


def parse_mesh(text: str) -> Mesh:
    """The mesh that a text such as `data=2,model=4` describes, of the first devices that there are.

    Raises:
        ValueError: it is not that, or there are not so many devices.
    """
    parts = [part.partition("=") for part in text.split(",")]
    sizes = {name.strip(): size.strip() for name, _, size in parts}
    known = set(sizes) <= set(MESH_AXES) and len(sizes) == len(parts)
    if not known or not all(re.fullmatch(r"[1-9]\d*", size) for size in sizes.values()):
        raise ValueError(f"--mesh {text} is not made of {', '.join(MESH_AXES)}, such as data=2,model=4.")
    shape = tuple(int(sizes.get(axis, 1)) for axis in MESH_AXES)
    there = jax.devices()
    if math.prod(shape) > len(there):
        raise ValueError(
            f"--mesh {text} asks for {math.prod(shape)} devices, but there are {len(there)} ({there[0].device_kind}); "
            "ask for fewer, or with JAX_PLATFORMS=cpu set JAX_NUM_CPU_DEVICES."
        )
    return mesh_of(there, shape)


def mesh_of(devices: Sequence[Any], shape: tuple[int, ...]) -> Mesh:
    """The first of some devices along `MESH_AXES`, of which the last ones may be left out: one device each."""
    shape = (*shape, *(1,) * (len(MESH_AXES) - len(shape)))
    chosen = np.array(devices[: math.prod(shape)]).reshape(shape)
    return Mesh(chosen, MESH_AXES, axis_types=(AxisType.Auto,) * len(shape))


@functools.cache
def program_mesh(config: ModelConfig, mesh: Mesh) -> Mesh:
    """The same devices as programs see them, along `ROWS`, `HEADS` and `SLOTS`.

    As many devices of `model` as divide a layer's KV heads share these; where there are more, those that have the same
    heads share their slots, and so do those along `slots`.

    Args:
        config: the model's shape.
        mesh: with axes of `MESH_AXES`.

    Raises:
        ValueError: the mesh has other axes.
    """
    check_mesh(mesh)
    names = [name for name in MESH_AXES if name in mesh.axis_names]
    devices = np.transpose(mesh.devices, [mesh.axis_names.index(name) for name in names])
    data, model, slots = (mesh.shape.get(axis, 1) for axis in MESH_AXES)
    heads = math.gcd(config.kv_heads, model)
    shape = data, heads, model // heads * slots
    return Mesh(devices.reshape(shape), (ROWS, HEADS, SLOTS), axis_types=(AxisType.Auto,) * 3)


def on_device(config: ModelConfig, mesh: Mesh | None, *, shares_slots: bool = False) -> ModelConfig:
    """A model's shape as one device of a `program_mesh` sees it.

    Args:
        config: of the whole model.
        mesh: the devices; None for one that has all of it.
        shares_slots: whether those that have the same heads have some slots of each, and not all of them.
    """
    if mesh is None:
        return config
    devices = mesh.shape[HEADS] * mesh.shape[SLOTS]
    # Where one device has all heads, there is no sum after attention, and shared output weights would ask for one.
    shares_outputs = mesh.shape[HEADS] > 1 and config.heads * (config.value_width or config.head_width) % devices == 0
    spread = Spread(
        heads=mesh.shape[HEADS],
        slots=mesh.shape[SLOTS] if shares_slots else 1,
        queries=1 if shares_slots else mesh.shape[SLOTS],
        outputs=mesh.shape[SLOTS] if shares_outputs else 1,
        mlp=devices > 1 and config.mlp_width % devices == 0,
        vocab=devices > 1 and config.vocab_size % devices == 0,
    )
    return dataclasses.replace(config, spread=spread)


def weight_specs(weights: PyTree, config: ModelConfig, mesh: Mesh | None) -> Any:
    """Where each leaf of a model's weights, or of one of its layers, lies on a `program_mesh`, as a `PartitionSpec`.

    Args:
        weights: arrays or their shapes.
        config: the model's shape.
        mesh: the devices; None for one that has all of it.
    """
    spread = on_device(config, mesh).spread
    sizes = {} if mesh is None else mesh.shape
    rules = dict(RULES, attended=RULES["attended" if spread.outputs > 1 else "heads"])
    spreads = {"heads": spread.heads > 1, "attended": spread.heads > 1, "mlp": spread.mlp, "vocab": spread.vocab}

    def along(axis: str | None) -> str | tuple[str, ...] | None:
        # As JAX writes it of results, or those that lie like a weight would be written otherwise than before a step.
        several = () if axis is None or not spreads[axis] else tuple(it for it in rules[axis] if sizes[it] > 1)
        return several[0] if len(several) == 1 else several or None

    def of(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        spec = [along(axis) for axis in _axes(leaf_name(path))]
        while spec and spec[-1] is None:
            spec.pop()
        return PartitionSpec(*spec)

    return jax.tree_util.tree_map_with_path(of, weights)


def _axes(name: str) -> tuple[str | None, ...]:
    for end, axes in AXES.items():
        if f".{name}".endswith(f".{end}"):
            return axes
        linear = end.removesuffix(".weight")
        if linear != end and f".{name}".endswith((f".{linear}.bias", f".{linear}.scale")):
            return axes[:1]
    return ()


def weight_shardings(config: ModelConfig, mesh: Mesh) -> Weights:
    """A sharding for each leaf of a model's weights.

    Query heads follow their KV heads; where the devices do not divide a width, what depends on it is whole on every
    device.

    Args:
        config: the model's shape.
        mesh: with axes of `MESH_AXES`.

    Raises:
        ValueError: the mesh has other axes.
    """
    devices = program_mesh(config, mesh)
    specs = weight_specs(weight_shapes(config), config, devices)
    return jax.tree.map(functools.partial(NamedSharding, devices), specs)
