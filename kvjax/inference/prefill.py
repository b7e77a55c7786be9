"""Prompts into an empty cache: in one program, or layer by layer if many layers share a program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key, UInt32

from kvjax.cache.dense import Dense
from kvjax.cache.empty import empty, empty_layers
from kvjax.cache.paged.build import Selected
from kvjax.inference.cache import policy_seeds
from kvjax.inference.layers import Reading, read_block, read_chunks, read_layers
from kvjax.inference.prepare import Loaded, Prompts
from kvjax.inference.sharding import (
    OF_HEADS,
    OF_ROWS,
    WHOLE,
    logits_spec,
    on_mesh,
    placed_shapes,
    policy_specs,
    read_specs,
    shared,
)
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import LayerWeights, Weights, embed, unembed
from kvjax.models.sharding import on_device, weight_specs
from kvjax.policies.policy import Policy
from kvjax.types import Kernels
from kvjax.utils.dependence import depends_on

DEEP = 12
"""Fewest layers with which a prompt is read layer by layer, because one program for all of them compiles slowly."""

Read = tuple[Any, Int[Array, " b"], UInt32[Array, " b"], Float[Array, "b vocab"]]
"""Storage (or selected slots, under plans with slots for each head), positions, seeds and logits."""


def read_prompts(model: Loaded, prompts: Prompts, kernels: Kernels) -> Read:
    """Read prompts; return the filled cache and the logits for the next tokens."""
    if _shared(model.config, prompts):
        return _read_layer_by_layer(model, prompts, kernels)
    return read_together(*program_arguments(model, prompts), **program_settings(model, prompts, kernels))


def prompt_shapes(model: Loaded, prompts: Prompts, kernels: Kernels) -> Read:
    """Return the shapes of the results of `read_prompts`, as `jax.ShapeDtypeStruct`; the weights may be shapes, too."""
    if _shared(model.config, prompts):
        return _read_layer_by_layer(model, prompts, kernels, lambda program: program.eval_shape)
    return read_together.eval_shape(*program_arguments(model, prompts), **program_settings(model, prompts, kernels))


def draws(model: Loaded, prompts: Prompts) -> bool:
    """Return whether the cache after prompts depends on their random keys."""

    def storage(keys: Key[Array, " b"], weights: Weights) -> Any:
        arguments = weights, prompts.policy, *_texts(prompts._replace(keys=keys)), prompts.limits
        return read_together(*arguments, **program_settings(model, prompts, Kernels()))[0]

    return "keys" in depends_on(storage, {"keys": prompts.keys, "weights": model.weights})


def lower_prompts(model: Loaded, prompts: Prompts) -> list[jax.stages.Lowered]:
    """Lower the programs of `read_prompts`, to compile them and read their `memory_analysis()`."""
    kernels = Kernels()
    if not _shared(model.config, prompts):
        return [read_together.lower(*program_arguments(model, prompts), **program_settings(model, prompts, kernels))]
    weights, config = model.weights, model.config
    around = dataclasses.replace(weights, layers=())
    mesh = model.mesh
    beginning = _begin.lower(around, *_texts(prompts), config=config, kernels=kernels, mesh=mesh)
    reading, x = placed_shapes(OF_ROWS, beginning.out_info, mesh)
    kinds = {
        (index, capacity): (layer, policy, limit, jnp.asarray(0), reading, x)
        for layer, policy, index, limit, capacity in _layers(model, prompts)
    }
    return [
        beginning,
        *(
            read_one_layer.lower(*arguments, config=config, index=index, capacity=capacity, mesh=mesh)
            for (index, capacity), arguments in kinds.items()
        ),
        _end.lower(around, reading, x, config=config, mesh=mesh),
    ]


def program_arguments(model: Loaded, prompts: Prompts) -> tuple[Any, ...]:
    return model.weights, prompts.policy, *_texts(prompts), prompts.limits


def _texts(prompts: Prompts) -> tuple[Any, ...]:
    return prompts.tokens, prompts.lengths, prompts.horizon, prompts.keys


def program_settings(model: Loaded, prompts: Prompts, kernels: Kernels) -> dict[str, Any]:
    sizes = dict(capacities=prompts.capacities, lines=prompts.lines, chunk=prompts.chunk)
    return dict(config=model.config, kernels=kernels, mesh=model.mesh, **sizes)


def _shared(config: ModelConfig, prompts: Prompts) -> bool:
    """Return whether prompts are read layer by layer, with programs that layers share."""
    requires = prompts.policy.score.requires
    apart = requires.shared_slots != "layers" and not requires.host_memory
    return config.layers >= DEEP and prompts.chunk is None and apart


def _layers(model: Loaded, prompts: Prompts) -> list[tuple[LayerWeights, Policy, int, Int[Array, "b h"], int]]:
    # Layers of one shape share the program of the first of them.
    shapes, policy = model.config.layer_configs, prompts.policy.sized(prompts.lines)
    like, limits = [shapes.index(shape) for shape in shapes], map(jnp.asarray, prompts.limits)
    policies = map(policy.layer, range(len(shapes)))
    return list(zip(model.weights.layers, policies, like, limits, prompts.capacities, strict=True))


def _read_layer_by_layer(
    model: Loaded, prompts: Prompts, kernels: Kernels, run: Callable[[Any], Any] = lambda program: program
) -> Read:
    # `run` turns a program into the function to call.
    weights, config = model.weights, model.config
    around, settings = dataclasses.replace(weights, layers=()), dict(config=config, mesh=model.mesh)
    reading, x = run(_begin)(around, *_texts(prompts), kernels=kernels, **settings)
    found: list[Dense | tuple[Selected, ...]] = []
    for number, (layer, policy, index, limit, capacity) in enumerate(_layers(model, prompts)):
        arguments = layer, policy, limit, jnp.asarray(number), reading, x
        storage, x = run(read_one_layer)(*arguments, index=index, capacity=capacity, **settings)
        found.append(storage)
    position, logits = run(_end)(around, reading, x, **settings)
    selected = [each for storage in found if not isinstance(storage, Dense) for each in storage]
    views = [view for storage in found if isinstance(storage, Dense) for view in storage.layers]
    return (Dense(tuple(views)) if views else tuple(selected)), position, reading.seed, logits


@functools.partial(jax.jit, static_argnames=("config", "kernels", "mesh"))
def _begin(
    weights: Weights,
    tokens: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    horizon: Int[Array, " b"],
    keys: Key[Array, " b"],
    *,
    config: ModelConfig,
    kernels: Kernels,
    mesh: Mesh | None,
) -> tuple[Reading, Float[Array, "b n width"]]:
    def here(
        weights: Weights, tokens: Array, lengths: Array, horizon: Array, keys: Array
    ) -> tuple[Reading, Float[Array, "b n width"]]:
        reading = _reading(tokens, lengths, horizon, keys, kernels)
        return reading, embed(weights, on_device(config, mesh), reading.token, reading.position)

    of_weights = weight_specs(weights, config, mesh)
    return on_mesh(here, mesh, (of_weights, *(OF_ROWS,) * 4), OF_ROWS)(weights, tokens, lengths, horizon, keys)


@functools.partial(jax.jit, static_argnames=("config", "index", "capacity", "mesh"), donate_argnames="x")
def read_one_layer(
    layer: LayerWeights,
    policy: Policy,
    limit: Int[Array, "b h"],
    number: Int[Array, ""],
    reading: Reading,
    x: Float[Array, "b n width"],
    *,
    config: ModelConfig,
    index: int,
    capacity: int,
    mesh: Mesh | None,
) -> tuple[Dense | tuple[Selected, ...], Float[Array, "b n width"]]:
    """Read whole prompts through one layer; equal layers share the program."""
    here = on_device(config, mesh)
    shape = here.layer(index)

    def read(
        layer: LayerWeights, policy: Policy, limit: Array, number: Array, reading: Reading, x: Array
    ) -> tuple[Dense | tuple[Selected, ...], Float[Array, "b n width"]]:
        storage = Dense((empty(policy, shape, number, limit=limit, slots=0, dtype=x.dtype),))
        alone = (layer,), (number,), (shape,)
        after, x = read_layers(*alone, here, (policy,), storage, reading, (capacity,), x, first=True)
        return shared(after, mesh), x

    of_layer = weight_specs(layer, config, mesh)
    given = of_layer, policy_specs(policy), OF_HEADS, WHOLE, OF_ROWS, OF_ROWS
    return on_mesh(read, mesh, given, (read_specs(policy, 1), OF_ROWS))(layer, policy, limit, number, reading, x)


@functools.partial(jax.jit, static_argnames=("config", "mesh"))
def _end(
    weights: Weights, reading: Reading, x: Float[Array, "b n width"], *, config: ModelConfig, mesh: Mesh | None
) -> tuple[Int[Array, " b"], Float[Array, "b vocab"]]:
    def end(weights: Weights, reading: Reading, x: Array) -> tuple[Int[Array, " b"], Float[Array, "b vocab"]]:
        logits = unembed(weights, on_device(config, mesh), reading.at_last(x, otherwise=x[:, 0]))
        return jnp.copy(reading.prompt_length), logits

    of_weights = weight_specs(weights, config, mesh)
    made = OF_ROWS, logits_spec(config, mesh)
    return on_mesh(end, mesh, (of_weights, OF_ROWS, OF_ROWS), made)(weights, reading, x)


@functools.partial(jax.jit, static_argnames=("config", "capacities", "lines", "chunk", "kernels", "mesh"))
def read_together(weights: Weights, policy: Policy, *texts: Any, **settings: Any) -> Read:
    """Read whole prompts through all layers in one program."""
    config, mesh = settings["config"], settings["mesh"]
    given = weight_specs(weights, config, mesh), policy_specs(policy), *(OF_ROWS,) * 4, OF_HEADS
    made = read_specs(policy, config.layers), OF_ROWS, OF_ROWS, logits_spec(config, mesh)
    return on_mesh(functools.partial(_read_on_device, **settings), mesh, given, made)(weights, policy, *texts)


def _read_on_device(
    weights: Weights,
    policy: Policy,
    tokens: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    horizon: Int[Array, " b"],
    keys: Key[Array, " b"],
    limits: tuple[Int[Array, "b h"], ...],
    *,
    config: ModelConfig,
    capacities: tuple[int, ...],
    lines: tuple[int, ...],
    chunk: int | None,
    kernels: Kernels,
    mesh: Mesh | None,
) -> Read:
    config = on_device(config, mesh)
    # A whole prompt starts with no slots, a prompt in chunks with a cache of its final size.
    buffers = (0,) * config.layers if chunk is None else capacities
    policy = policy.sized(lines)
    storage: Any = Dense(empty_layers(policy, config.layer_configs, limits, buffers, weights.dtype))
    whole = _reading(tokens, lengths, horizon, keys, kernels)
    if chunk is None:
        storage, hidden = read_block(weights, config, policy, storage, whole, capacities, first=True)
        last = whole.at_last(hidden, otherwise=hidden[:, 0])
    else:
        if policy.score.requires.host_memory:
            for layer in range(config.layers):
                storage = storage.moved(layer, jax.memory.Space.Host)
        storage, last = read_chunks(weights, config, policy, storage, whole, capacities, chunk)
    # Copy the lengths: a step may donate the positions, but the lengths must stay valid. As outputs of this program,
    # positions are committed to devices like the storage; otherwise a step would compile again for its own results.
    return shared(storage, mesh), jnp.copy(lengths), whole.seed, unembed(weights, config, last)


def _reading(
    tokens: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    horizon: Int[Array, " b"],
    keys: Key[Array, " b"],
    kernels: Kernels,
) -> Reading:
    """Return a `Reading` of whole prompts."""
    place = jnp.arange(tokens.shape[1])
    return Reading(
        token=tokens,
        position=jnp.where(place < lengths[:, None], place, -1),
        prompt_length=lengths,
        read=lengths,
        horizon=horizon,
        end=lengths + horizon,
        seed=policy_seeds(keys),
        kernels=kernels,
    )
