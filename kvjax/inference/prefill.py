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

from kvjax.cache.layer import Caches, LayerCache
from kvjax.cache.slots import HOST
from kvjax.inference.cache import Bound, Cache, policy_seeds
from kvjax.inference.layers import block_once, read, read_block, read_chunks
from kvjax.inference.prepare import Prompts
from kvjax.inference.sharding import (
    bound_specs,
    layer_specs,
    logits_spec,
    on_mesh,
    placed_shapes,
    prompt_specs,
    scatter_slots,
)
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Layer, Weights, begin, unembed
from kvjax.models.model import LanguageModel
from kvjax.models.sharding import on_device, weight_specs
from kvjax.types import OF_HEADS, OF_ROWS, Kernels, PyTree, TokenBatch
from kvjax.utils.dependence import depends_on
from pallas_kernels.op import using

DEEP = 12
"""Fewest layers with which a prompt is read layer by layer, because one program for all of them compiles slowly."""

Read = tuple[tuple[LayerCache, ...], Int[Array, " b"], UInt32[Array, " b"], Float[Array, "b vocab"]]
"""Layers (with selected slots, under plans with slots for each head), positions, seeds and logits."""


def bound_prompts(model: LanguageModel | Bound, prompts: Prompts) -> Bound:
    """Return a model with the policy of prompts, for the functions below."""
    return Bound(weights=model.weights, policy=prompts.policy, config=model.config, mesh=model.mesh)


def read_prompts(decoder: Bound, prompts: Prompts, run: Callable[[Any], Any] = lambda program: program) -> Read:
    """Read prompts; return the filled cache and the logits for the next tokens.

    `run` turns each program into the function that is called in its place.
    """
    requires, settings = prompts.policy.score.requires, dict(config=decoder.config, mesh=decoder.mesh)
    of_layer: dict[str, Any] = dict(kernels=decoder.kernels, mesh=decoder.mesh)
    by_layer = requires.shared_slots != "layers" and not requires.host_memory
    if decoder.config.layers < DEEP or prompts.chunk is not None or not by_layer:
        return run(read_together)(*program_arguments(decoder, prompts), **program_settings(prompts))
    around = dataclasses.replace(decoder.weights, layers=())
    reading, x = run(_begin)(around, *_texts(prompts), **settings)
    caches = list[LayerCache]()
    layers = decoder.replace(policy=decoder.policy.sized(prompts.lines)).layers
    # Layers of one shape share a program, so that their numbers are arrays.
    numbered = [layer.replace(number=jnp.asarray(layer.number)) for layer in layers]
    limits = tuple(map(jnp.asarray, prompts.limits))
    for place in independent_runs(decoder.config):
        sizes = prompts.capacities[place]
        if len(sizes) == 1:
            of_run = numbered[place.start], limits[place.start]
            cache, x = run(read_one_layer)(*of_run, reading, x, capacity=sizes[0], **of_layer)
            caches.append(cache)
        else:
            of_run = tuple(numbered[place]), limits[place]
            after, x = run(read_run)(*of_run, reading, x, capacities=sizes, first=place.start, **of_layer)
            caches.extend(after)
    position, logits = run(_end)(around, reading, x, **settings)
    return tuple(caches), position, reading.seed, logits


def prompt_shapes(decoder: Bound, prompts: Prompts) -> Read:
    """Return the shapes of the results of `read_prompts`, as `jax.ShapeDtypeStruct`; the weights may be shapes, too."""
    return read_prompts(decoder, prompts, lambda program: program.eval_shape)


def draws(model: LanguageModel | Bound, prompts: Prompts) -> bool:
    """Return whether the cache after prompts depends on their random keys."""

    def caches(keys: Key[Array, " b"], weights: Weights) -> Any:
        decoder, keyed = bound_prompts(model, prompts).replace(weights=weights), prompts._replace(keys=keys)
        return read_together(*program_arguments(decoder, keyed), **program_settings(prompts))[0]

    return "keys" in depends_on(caches, {"keys": prompts.keys, "weights": model.weights})


def lower_prompts(model: LanguageModel | Bound, prompts: Prompts) -> list[jax.stages.Lowered]:
    """Lower the programs of `read_prompts`, to compile them and read their `memory_analysis()`."""
    lowered: dict[Any, jax.stages.Lowered] = {}

    def run(program: Any) -> Callable[..., Any]:
        def lower(*arguments: Any, **settings: Any) -> Any:
            key = jax.tree.structure(arguments), *settings.items()
            if key not in lowered:
                lowered[key] = program.lower(*arguments, **settings)
            return placed_shapes(OF_ROWS, lowered[key].out_info, model.mesh)

        return lower

    read_prompts(bound_prompts(model, prompts), prompts, run)
    return list(lowered.values())


def program_arguments(decoder: Bound, prompts: Prompts) -> tuple[Any, ...]:
    return decoder, *_texts(prompts), prompts.limits


def program_settings(prompts: Prompts) -> dict[str, Any]:
    return dict(capacities=prompts.capacities, lines=prompts.lines, chunk=prompts.chunk)


def _texts(prompts: Prompts) -> tuple[Any, ...]:
    return prompts.tokens, prompts.lengths, prompts.horizon, prompts.keys, prompts.rope_length


@functools.partial(jax.jit, static_argnames=("config", "mesh"))
def _begin(
    weights: Weights, *texts: Array, config: ModelConfig, mesh: Mesh | None
) -> tuple[TokenBatch, Float[Array, "b n width"]]:
    def begin_on_device(weights: Weights, *texts: Array) -> tuple[TokenBatch, Float[Array, "b n width"]]:
        return begin(weights, on_device(config, mesh), _reading(*texts))

    def specs() -> tuple[PyTree, PyTree]:
        return (weight_specs(weights, config, mesh), *(OF_ROWS,) * len(texts)), OF_ROWS

    return on_mesh(begin_on_device, mesh, specs)(weights, *texts)


def independent_runs(config: ModelConfig) -> list[slice]:
    """Split the layers of a model into runs, of which none reads the cache of a layer in another run."""
    starts, earliest = list[int](), config.layers
    for index in reversed(range(config.layers)):
        source = config.layer(index).source
        earliest = min(earliest, index if source is None else source)
        if earliest == index:
            starts.append(index)
    starts.reverse()
    return list(map(slice, starts, [*starts[1:], config.layers]))


@functools.partial(jax.jit, static_argnames=("capacity", "kernels", "mesh"), donate_argnames="x")
def read_one_layer(
    layer: Layer,
    limit: Int[Array, "b h"],
    reading: TokenBatch,
    x: Float[Array, "b n width"],
    *,
    capacity: int,
    kernels: Kernels,
    mesh: Mesh | None,
) -> tuple[LayerCache, Float[Array, "b n width"]]:
    """Read whole prompts through one layer; equal layers share the program."""

    def run(layer: Layer, limit: Array, reading: TokenBatch, x: Array) -> tuple[LayerCache, Float[Array, "b n width"]]:
        layer = layer.replace(config=on_device(layer.config, mesh))
        cache = layer.init_cache(limit, 0, x.dtype).grow(capacity)
        caches, _, x = read((layer,), (cache,), reading, x)
        return scatter_slots(caches, mesh)[0], x

    def specs() -> tuple[PyTree, PyTree]:
        return (layer_specs(layer, mesh), OF_HEADS, OF_ROWS, OF_ROWS), (prompt_specs([layer])[0], OF_ROWS)

    return on_mesh(using(kernels)(run), mesh, specs)(layer, limit, reading, x)


@functools.partial(jax.jit, static_argnames=("capacities", "first", "kernels", "mesh"))
def read_run(
    layers: tuple[Layer, ...],
    limits: tuple[Int[Array, "b h"], ...],
    reading: TokenBatch,
    x: Float[Array, "b n width"],
    *,
    capacities: tuple[int, ...],
    first: int,
    kernels: Kernels,
    mesh: Mesh | None,
) -> tuple[Caches, Float[Array, "b m width"]]:
    """Read whole prompts through layers of which some read others; `first` is the index of the first one.

    Those at the end that store nothing run for the last token alone.
    """

    def run(layers: Any, limits: Any, reading: TokenBatch, x: Array) -> tuple[Caches, Float[Array, "b m width"]]:
        here = [layer.replace(config=on_device(layer.config, mesh)) for layer in layers]
        planned = zip(here, limits, capacities, strict=True)
        grown = [layer.init_cache(limit, 0, x.dtype).grow(size) for layer, limit, size in planned]
        caches, _, x = read(here, grown, reading, x, run=block_once(kernels), first=first, last=True)
        return scatter_slots(caches, mesh), x

    def specs() -> tuple[PyTree, PyTree]:
        of_layers = tuple(layer_specs(layer, mesh) for layer in layers)
        return (of_layers, OF_HEADS, OF_ROWS, OF_ROWS), (prompt_specs(layers), OF_ROWS)

    return on_mesh(using(kernels)(run), mesh, specs)(layers, limits, reading, x)


@functools.partial(jax.jit, static_argnames=("config", "mesh"))
def _end(
    weights: Weights, reading: TokenBatch, x: Float[Array, "b n width"], *, config: ModelConfig, mesh: Mesh | None
) -> tuple[Int[Array, " b"], Float[Array, "b vocab"]]:
    def end(weights: Weights, reading: TokenBatch, x: Array) -> tuple[Int[Array, " b"], Float[Array, "b vocab"]]:
        logits = unembed(weights, on_device(config, mesh), reading.at_last(x, otherwise=x[:, 0]))
        return jnp.copy(reading.prompt_length), logits

    def specs() -> tuple[PyTree, PyTree]:
        return (weight_specs(weights, config, mesh), OF_ROWS, OF_ROWS), (OF_ROWS, logits_spec(config, mesh))

    return on_mesh(end, mesh, specs)(weights, reading, x)


@functools.partial(jax.jit, static_argnames=("capacities", "lines", "chunk"))
def read_together(decoder: Bound, *texts: Any, **settings: Any) -> Read:
    """Read whole prompts through all layers in one program."""

    def specs() -> tuple[PyTree, PyTree]:
        in_specs = bound_specs(decoder), *(OF_ROWS,) * 5, OF_HEADS
        return in_specs, (prompt_specs(decoder.layers), OF_ROWS, OF_ROWS, logits_spec(decoder.config, decoder.mesh))

    here = using(decoder.kernels)(functools.partial(_read_on_device, **settings))
    return on_mesh(here, decoder.mesh, specs)(decoder, *texts)


def _read_on_device(
    decoder: Bound,
    tokens: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    horizon: Int[Array, " b"],
    keys: Key[Array, " b"],
    rope_length: Int[Array, " b"] | None,
    limits: tuple[Int[Array, "b _"], ...],
    *,
    capacities: tuple[int, ...],
    lines: tuple[int, ...],
    chunk: int | None,
) -> Read:
    decoder = decoder.here().replace(policy=decoder.policy.sized(lines))
    # A whole prompt starts with no slots, a prompt in chunks with a cache of its final size.
    slots = (0,) * decoder.config.layers if chunk is None else capacities
    caches = decoder.init_caches(limits, slots)
    batch = _reading(tokens, lengths, horizon, keys, rope_length)
    if chunk is None:
        caches, hidden = read_block(decoder, caches, batch, capacities, last=True)
        last = batch.at_last(hidden, otherwise=hidden[:, 0])
    else:
        if decoder.policy.score.requires.host_memory:
            caches = tuple(cache.moved(HOST) for cache in caches)
        cache = Cache.empty(caches, 0, horizon, batch.end, batch.seed, rope_length=rope_length)
        cache, last = read_chunks(decoder, cache, batch, chunk)
        caches = cache.layers
    # Copy the lengths: a step may donate the positions, but the lengths must stay valid. As outputs of this program,
    # positions are committed to devices like the caches; otherwise a step would compile again for its own results.
    logits = unembed(decoder.weights, decoder.config, last)
    return scatter_slots(caches, decoder.mesh), jnp.copy(lengths), batch.seed, logits


def _reading(
    tokens: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    horizon: Int[Array, " b"],
    keys: Key[Array, " b"],
    rope_length: Int[Array, " b"] | None,
) -> TokenBatch:
    """Return a `TokenBatch` of whole prompts."""
    batch = TokenBatch.of_text(tokens, lengths)
    return batch.replace(
        position=jnp.where(batch.position < lengths[:, None], batch.position, -1),
        horizon=horizon,
        end=lengths + horizon,
        seed=policy_seeds(keys),
        rope_length=rope_length,
    )
