"""Sharding of a model over a mesh of devices: the mesh axes of each leaf, and the config of one device."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Weights
from kvjax.models.weights import leaf_name, weight_shapes
from kvjax.types import HEADS, ROWS, SLOTS, PyTree, Spread

MESH_AXES = ("data", "model", "slots")
"""Names of a mesh's axes.

Rows of a batch are sharded over the first axis, heads and columns of the MLP over the second. The third axis also
shards columns of the MLP, and it shards the slots of each head.
"""

AXES: Mapping[str, tuple[str | None, ...]] = {
    "embedding": ("vocab", None),
    **dict.fromkeys(("query.weight", "key.weight", "value.weight", "mixer.gate.weight"), ("heads", None)),
    **dict.fromkeys(("mixer.beta", "mixer.decay", "query_taps", "key_taps", "value_taps"), ("heads", None)),
    **dict.fromkeys(("decay_bias", "log_rate"), ("heads",)),
    "output.weight": (None, "attended"),
    "sink_logits": ("heads",),
    **dict.fromkeys(("query_norm.scale", "key_norm.scale"), ("normed",)),
    **dict.fromkeys(("experts.gate.weight", "experts.up.weight", "experts.down.weight"), ("experts", None, None)),
    **dict.fromkeys(("shared.gate.weight", "shared.up.weight"), ("experts", None)),
    "shared.down.weight": (None, "experts"),
    **dict.fromkeys(("gate.weight", "up.weight"), ("mlp", None)),
    "down.weight": (None, "mlp"),
    "unembedding.weight": ("vocab", None),
}
"""Logical axes of each leaf, by the first end of its name that is listed; all other leaves are replicated.

Biases and scales of linear maps are sharded like the first axis of their weights.
"""


def check_mesh(mesh: Mesh) -> None:
    """Refuse a mesh with axes other than `MESH_AXES`."""
    if not set(mesh.axis_names) <= set(MESH_AXES):
        raise ValueError(f"a mesh with the axes {', '.join(mesh.axis_names)} is none of {', '.join(MESH_AXES)}.")


def parse_mesh(text: str) -> Mesh:
    """Make the mesh that a text such as `data=2,model=4` describes, from the first available devices.

    Raises:
        ValueError: if the text has another form, or there are too few devices.
    """
    parts = [part.partition("=") for part in text.split(",")]
    sizes = {name.strip(): size.strip() for name, _, size in parts}
    valid = set(sizes) <= set(MESH_AXES) and len(sizes) == len(parts)
    if not valid or not all(re.fullmatch(r"[1-9]\d*", size) for size in sizes.values()):
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
    """Make a mesh with `MESH_AXES` from the first devices; axes missing at the end of `shape` have size 1."""
    shape = (*shape, *(1,) * (len(MESH_AXES) - len(shape)))
    chosen = np.array(devices[: math.prod(shape)]).reshape(shape)
    return Mesh(chosen, MESH_AXES, axis_types=(AxisType.Auto,) * len(shape))


@functools.cache
def program_mesh(config: ModelConfig, mesh: Mesh) -> Mesh:
    """Return a mesh of the same devices with the axes of programs: `ROWS`, `HEADS` and `SLOTS`.

    `HEADS` gets the greatest common divisor of the numbers of KV heads (and of key heads in recurrent layers) and the
    size of `model`. The remaining factor of
    `model` joins `slots` in `SLOTS`: its devices hold the same heads and shard the slots of each.
    """
    check_mesh(mesh)
    names = [name for name in MESH_AXES if name in mesh.axis_names]
    devices = np.transpose(mesh.devices, [mesh.axis_names.index(name) for name in names])
    data, model, slots = (mesh.shape.get(axis, 1) for axis in MESH_AXES)
    heads = math.gcd(model, *config.shared_heads)
    shape = data, heads, model // heads * slots
    return Mesh(devices.reshape(shape), (ROWS, HEADS, SLOTS), axis_types=(AxisType.Auto,) * 3)


def on_mesh(
    function: Callable[..., Any], mesh: Mesh | None, specs: Callable[[], tuple[PyTree, PyTree]]
) -> Callable[..., Any]:
    """Turn a function of one device's shards into a function of sharded arrays; without a mesh, return it unchanged.

    `specs` returns trees of `PartitionSpec` for the arguments and for the results; one spec may stand for a whole tree.
    """
    if mesh is None:
        return function
    in_specs, out_specs = specs()

    def run(*arguments: Any) -> Any:
        # Flat, because shard_map would make policies of placeholders that are not numbers.
        flat, tree = jax.tree.flatten(arguments)

        def of_flat(*flat: Any) -> Any:
            return function(*jax.tree.unflatten(tree, flat))

        flat_specs = _leaf_specs(in_specs, arguments)
        return jax.shard_map(of_flat, mesh=mesh, in_specs=flat_specs, out_specs=out_specs, check_vma=False)(*flat)

    return run


def _leaf_specs(specs: PyTree, arguments: PyTree) -> tuple[PartitionSpec, ...]:
    """Return a spec for each leaf of the arguments, from specs that may stand for whole trees."""

    def broadcast(spec: PartitionSpec, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda _: spec, tree)

    return tuple(jax.tree.leaves(jax.tree.map(broadcast, specs, arguments)))


def on_device(config: ModelConfig, mesh: Mesh | None, *, shares_slots: bool = False) -> ModelConfig:
    """Return a model's configuration for one device of a `program_mesh`; `mesh` is None for a single device.

    If `shares_slots`, devices with the same heads shard the slots of each head; otherwise each has all slots.
    """
    if mesh is None:
        return config
    devices = mesh.shape[HEADS] * mesh.shape[SLOTS]
    # If one device has all heads, no sum follows attention; sharded output weights would need one.
    shares_outputs = mesh.shape[HEADS] > 1 and not any(features % devices for features in config.mixed_features)
    spread = Spread(
        heads=mesh.shape[HEADS],
        slots=mesh.shape[SLOTS] if shares_slots else 1,
        queries=1 if shares_slots else mesh.shape[SLOTS],
        outputs=mesh.shape[SLOTS] if shares_outputs else 1,
        mlp=devices > 1 and not any(width % devices for width in config.widths_of_mlps),
        experts=devices > 1 and config.mixture is not None and config.mixture.divides(devices),
        vocab=devices > 1 and config.vocab_size % devices == 0,
    )
    return dataclasses.replace(config, spread=spread)


def weight_specs(weights: PyTree, config: ModelConfig, mesh: Mesh | None) -> Any:
    """Return the `PartitionSpec` on a `program_mesh` of each leaf of a model's weights, or of one layer's."""
    spread = on_device(config, mesh).spread
    sizes = {} if mesh is None else mesh.shape
    replicated, heads, everywhere = (), (HEADS,), (HEADS, SLOTS)
    rules: dict[str | None, tuple[str, ...]] = {
        None: replicated,
        "heads": heads,
        "attended": everywhere if spread.outputs > 1 else heads,
        "normed": heads if config.query_key_norm_over == "heads" else replicated,
        "mlp": everywhere if spread.mlp else replicated,
        "experts": everywhere if spread.experts else replicated,
        "vocab": everywhere if spread.vocab else replicated,
    }

    def along(axis: str | None) -> str | tuple[str, ...] | None:
        # Write the spec as JAX writes it for results, to keep specs of results equal to those of weights.
        several = tuple(it for it in rules[axis] if sizes.get(it, 1) > 1)
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
    """Return the sharding of each leaf of a model's weights.

    Query heads are sharded with their KV heads. If the number of devices does not divide a dimension, its leaves are
    replicated.
    """
    devices = program_mesh(config, mesh)
    specs = weight_specs(weight_shapes(config), config, devices)
    return jax.tree.map(functools.partial(NamedSharding, devices), specs)
