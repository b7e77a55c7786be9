"""Programs on a mesh, in which each device has some rows and heads, and the sharding of their arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax.cache.layer import Caches, LayerCache
from kvjax.cache.paged.pages import Pool
from kvjax.cache.paged.select import Selected
from kvjax.cache.paged.storage import Pages
from kvjax.cache.slots import Slots
from kvjax.inference.cache import ROWS as OF_EACH_ROW
from kvjax.inference.cache import Bound, Cache
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Layer
from kvjax.models.sharding import on_device, on_mesh, weight_specs
from kvjax.policies.base import Part
from kvjax.policies.policy import Policy
from kvjax.types import HEADS, OF_ROWS, REPLICATED, ROWS, SLOTS, PyTree, Spread

C = TypeVar("C", bound=LayerCache)


def run_on_mesh(
    function: Callable[..., Any],
    decoder: Bound,
    cache: Cache,
    *arguments: Any,
    argument_specs: PyTree = OF_ROWS,
    out_specs: Callable[[], PyTree],
) -> Any:
    """Call a function of one device's decoder, cache and other arguments on each device.

    `argument_specs` are the specs of the other arguments; `out_specs` returns those of the results.
    """

    def of_arguments(decoder: Bound, cache: Cache, arguments: tuple[Any, ...]) -> Any:
        return function(decoder, cache, *arguments)

    def specs() -> tuple[PyTree, PyTree]:
        return (bound_specs(decoder), cache.specs, argument_specs), out_specs()

    return decoder.run(of_arguments, cache, arguments, specs=specs)


def constrain(tree: PyTree, specs: Callable[[], PyTree], mesh: Mesh | None) -> Any:
    """Constrain arrays to the sharding of their specs, in a program whose results are arguments of another one.

    With another sharding, the other program would transfer them and compile again.
    """

    def both() -> tuple[PyTree, PyTree]:
        tree_specs = specs()
        return (tree_specs,), tree_specs

    return on_mesh(lambda same: same, mesh, both)(tree)


def placed_by_program(tree: PyTree, specs: PyTree, mesh: Mesh | None) -> Any:
    """Move arrays to the sharding of their specs, by a program, which also reaches devices of other processes."""
    if mesh is None:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _constrain_leaves(leaves, specs=tuple(jax.tree.leaves(specs)), mesh=mesh))


def placed_policy(policy: Policy, mesh: Mesh | None) -> Policy:
    """Move a bound policy's arrays to the sharding that programs expect; numbers become arrays, too."""
    arrays = jax.tree.map(jnp.asarray, policy)  # else every step would transfer host numbers
    return arrays if mesh is None else placed_by_program(arrays, policy_specs(arrays), mesh)


@functools.partial(jax.jit, static_argnames=("specs", "mesh"))
def _constrain_leaves(leaves: list[Array], *, specs: tuple[PartitionSpec, ...], mesh: Mesh) -> list[Array]:
    return constrain(leaves, lambda: list(specs), mesh)


def copying(mesh: Mesh) -> Mesh:
    """Return a `program_mesh` whose devices along `ROWS` hold copies of all rows, for rows too few to shard."""
    axes = ("copies", *mesh.axis_names)
    devices = mesh.devices.reshape(mesh.shape[ROWS], 1, *mesh.devices.shape[1:])
    return Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))


def whole_rows(specs: PyTree) -> Any:
    """Return the specs of arrays without sharding over `ROWS`: all devices along that axis have a copy."""
    return jax.tree.map(lambda spec: PartitionSpec(*(None if axis == ROWS else axis for axis in spec)), specs)


def placed_shapes(specs: PyTree, tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Return the shapes of a tree with the sharding that its specs describe; one may stand for a whole tree."""

    def shape_of(spec: PartitionSpec, leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = None if mesh is None else NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(lambda spec, subtree: jax.tree.map(lambda leaf: shape_of(spec, leaf), subtree), specs, tree)


def logits_spec(config: ModelConfig, mesh: Mesh | None) -> PartitionSpec:
    """Return the `PartitionSpec` of logits [b vocab]."""
    return PartitionSpec(ROWS, (HEADS, SLOTS)) if on_device(config, mesh).spread.vocab else OF_ROWS


def prompt_specs(layers: Sequence[Layer]) -> Any:
    """Return the specs of layers after prompts, which leave selected slots under plans with slots for each head."""
    kinds = [layer.weights.mixer.cache_kind for layer in layers]
    return tuple(
        Selected.specs if layer.policy.plan.sizing.per_head and kind is Slots else kind.specs
        for layer, kind in zip(layers, kinds, strict=True)
    )


def buffer_specs(layers: Caches) -> Any:
    """Return the specs of layers whose pages, if they have some, are unpacked into buffers."""
    return tuple(Slots.specs if isinstance(layer, Pages) else type(layer).specs for layer in layers)


def page_specs(pool: Pool, layers: int) -> Any:
    """Return the specs of layers with pages, and of their pool."""
    return (Pages.specs,) * layers, pool.specs


def scatter_slots(caches: tuple[C, ...], mesh: Mesh | None) -> tuple[C, ...]:
    """Keep this device's shard of the slots, after all devices with the same heads have computed all slots."""
    return tuple(cache.of_slots(_slots_of(mesh).own_slots) for cache in caches)


def gather_slots(cache: Cache, mesh: Mesh | None) -> Cache:
    """Gather all slots of this device's heads in each layer of a cache; the inverse of `scatter_slots`."""
    return cache.replace(layers=tuple(layer.of_slots(_slots_of(mesh).all_slots) for layer in cache.layers))


def _slots_of(mesh: Mesh | None) -> Spread:
    return Spread(slots=1 if mesh is None else mesh.shape[SLOTS])


def policy_specs(policy: Policy) -> Any:
    """Return the specs of a policy's arrays: sharded by KV head in the fields `of_heads`, otherwise replicated."""
    return _head_specs(policy, jax.tree.map(lambda _: REPLICATED, policy))


def bound_specs(decoder: Bound) -> Any:
    """Return the specs of the arrays of a model and its policy, as the programs of `decoder` take them."""
    weights = weight_specs(decoder.weights, decoder.config, decoder.mesh)
    return decoder.replace(weights=weights, policy=policy_specs(decoder.policy))


def layer_specs(layer: Layer, mesh: Mesh | None) -> Any:
    """Return the specs of a layer whose number is an array."""
    weights = weight_specs(layer.weights, layer.config, mesh)
    return layer.replace(weights=weights, policy=policy_specs(layer.policy), number=REPLICATED)


def placed_rows(cache: Cache, mesh: Mesh | None) -> Cache:
    """Move the per-row arrays to the sharding that programs expect, to avoid a transfer at each step."""
    rows = {name: array for name in OF_EACH_ROW if (array := getattr(cache, name)) is not None}
    return cache.replace(**placed_by_program(rows, dict.fromkeys(rows, OF_ROWS), mesh))


def unpacked(cache: Cache, mesh: Mesh | None) -> Cache:
    """Return a cache whose pages are unpacked into buffers of one size for all heads of a layer."""
    if (pool := cache.pool) is None:
        return cache

    def unpack(layers: Caches, pool: Pool) -> Caches:
        return scatter_slots(cache.replace(layers=layers, pool=pool).unpacked(), mesh)

    def specs() -> tuple[PyTree, PyTree]:
        return (cache.specs.layers, pool.specs), buffer_specs(cache.layers)

    return cache.replace(layers=on_mesh(unpack, mesh, specs)(cache.layers, cache.pool), pool=None)


def _head_specs(part: Any, specs: Any) -> Any:
    # The specs of a policy or a part, with those of its own parts.
    of_heads = getattr(part, "of_heads", ())
    changes = {name: jax.tree.map(lambda _: PartitionSpec(HEADS), getattr(part, name)) for name in of_heads}
    for field in dataclasses.fields(part):
        inner = getattr(part, field.name)
        if isinstance(inner, Part):
            changes[field.name] = _head_specs(inner, getattr(specs, field.name))
    return dataclasses.replace(specs, **changes)
