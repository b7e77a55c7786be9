"""Eviction in all layers of a filled cache, after the text has been read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.evict import foreseen
from kvjax.cache.keep import allocated, allocated_together, keep_best
from kvjax.cache.layer import Caches, LayerCache
from kvjax.cache.paged.build import pack
from kvjax.cache.paged.pages import Pool
from kvjax.cache.paged.select import Selected
from kvjax.cache.paged.table import page_slots, table
from kvjax.cache.slots import Slots
from kvjax.inference.cache import Bound, Cache
from kvjax.inference.padding import among_devices, round_slots
from kvjax.inference.prepare import Prompts
from kvjax.inference.sharding import gather_slots, on_mesh, page_specs, prompt_specs, run_on_mesh, scatter_slots
from kvjax.models.config import ModelConfig
from kvjax.policies.allocation import Uniform
from kvjax.policies.base import label_of
from kvjax.policies.policy import Policy
from kvjax.policies.residual import Queries, SlotResidual
from kvjax.policies.stats import flatten_requests
from kvjax.types import HEADS, OF_HEADS, OF_POOL, OF_ROWS, ROWS, LayerTokens, PyTree
from kvjax.utils.dependence import depends_on
from kvjax.utils.processes import on_host

Pressed = tuple[Caches, Bool[Array, " b"]]
"""Layers (with selected slots, under plans with slots for each head), and a mask of rows with scores of NaN."""

Asking = tuple[tuple[Float[Array, "b h g n d"], ...], Bool[Array, "b n"]]
"""Queries of each layer with slots that stand for later ones, and a mask of those that are no padding."""

Limits = tuple[Int[Array, "b _"], ...]
"""Slots that each head may use, by layer."""

Ranked = tuple[Mapping[int, Slots], Sequence[LayerTokens]]
"""All slots of a device's heads, by the indices of the layers that have some, and the tokens that rank them."""


def reads_all_first(policy: Policy) -> bool:
    """Return whether all layers read a whole prompt before any of its tokens is evicted."""
    return policy.score.requires.replay is not None or policy.plan.sizing.all_layers


def unevicted(prompts: Prompts, config: ModelConfig, mesh: Mesh | None) -> Prompts:
    """Return the same prompts with a slot for each token, except for tokens that a layer's window excludes."""
    policy = dataclasses.replace(prompts.policy, plan=Uniform(), evict_every=1)
    size = prompts.tokens.shape[1]
    windows = [size if layer.window is None else min(size, round_slots(layer.window)) for layer in config.layer_configs]
    heads = zip(config.layer_configs, windows, strict=True)
    limits = tuple(np.full((len(prompts.tokens), layer.kv_heads), window, np.int32) for layer, window in heads)
    return prompts._replace(policy=policy, limits=limits, capacities=among_devices(windows, mesh))


def ranking_inputs(decoder: Bound, cache: Cache) -> tuple[list[Policy], dict[int, Slots], list[LayerTokens]]:
    """Return the policy of each layer with slots, its slots, and the newest token, as far as a ranking may use it."""
    reading, layers, slots = cache.newest, decoder.here().layers, gather_slots(cache, decoder.mesh).slots_by_layer
    new = [reading.ahead(layers[index].shape, index, decoder.weights.dtype) for index in slots]
    return [layers[index].policy for index in slots], slots, new


def held_layers(decoder: Bound, cache: Cache, limits: Limits) -> Ranked:
    """Return the slots of a cache with other limits, to be ranked by the newest token."""
    policies, views, new = ranking_inputs(decoder, cache)
    if not foreseen(policies, list(views.values()), new):
        raise ValueError(
            f"{policies[0].label} ranks slots by the token that needs one, so it has no ranking before that token."
        )
    return {index: view.replace(limit=limits[index]) for index, view in views.items()}, new


@functools.partial(jax.jit, static_argnames=("capacities", "layers_of"))
def press(
    decoder: Bound,
    cache: Cache,
    limits: Limits,
    capacities: tuple[int, ...],
    asking: Asking | None = None,
    layers_of: Callable[[Bound, Cache, Limits], Ranked] = held_layers,
) -> Pressed:
    """Evict the lowest-ranked slots of all heads by the decoder's policy.

    Args:
        cache: cache without a random key, see `Cache.key`.
        limits: slots that each head may use, by layer.
        capacities: slots of the buffers, by layer.
        asking: queries that stand for later ones; None if there are none.
        layers_of: function that returns the slots of one device's cache, in the form of the policy, given the limits of
            the layers that store.
    """
    press_on_device = functools.partial(_press_on_device, capacities=capacities, layers_of=layers_of)
    return run_on_mesh(
        press_on_device,
        decoder,
        cache,
        limits,
        asking,
        argument_specs=(OF_HEADS, None if asking is None else (OF_HEADS, OF_ROWS)),
        out_specs=lambda: (prompt_specs(decoder.layers), OF_ROWS),
    )


def _press_on_device(
    decoder: Bound,
    cache: Cache,
    limits: Limits,
    asking: Asking | None,
    *,
    capacities: tuple[int, ...],
    layers_of: Callable[[Bound, Cache, Limits], Ranked],
) -> Pressed:
    by_layer, new = layers_of(decoder, cache, limits)
    indices, views, of_layers = list(by_layer), list(by_layer.values()), decoder.layers
    policies = [of_layers[index].policy for index in indices]
    layers = list(zip(policies, views, new, strict=True))
    for policy, view, tokens in layers:
        if flatten_requests(policy.plan.attention_stats(view, tokens))[0]:
            raise ValueError(f"plan {label_of(policy.plan)} needs attention of the text, which a cache does not hold.")
    sizing = policies[0].plan.sizing
    if sizing.all_layers:
        views = allocated_together(policies, views, new)
    else:
        views = [allocated(policy, view, (), tokens) for policy, view, tokens in layers]
    pressed, undefined = dict[int, LayerCache](), jnp.zeros(len(views[0].limit), bool)
    for place, (index, policy, view, tokens) in enumerate(zip(indices, policies, views, new, strict=True)):
        keep = functools.partial(keep_best, policy, view, tokens, capacities[index], select_heads=sizing.per_head)
        queries = None if asking is None else Queries(asking[0][place], asking[1])
        if queries is None and isinstance(policy.residual, SlotResidual):
            _check_no_queries(policy, keep, Queries(tokens.q, tokens.valid))
        selected = keep(queries=queries)
        undefined = undefined if selected.undefined is None else undefined | selected.undefined
        pressed[index] = selected.slots
    return scatter_slots(cache.with_layers(pressed), decoder.mesh), undefined


def _check_no_queries(policy: Policy, keep: Callable[..., Any], queries: Queries) -> None:
    # Refuses a residual whose result depends on queries where there are none; `queries` have the shapes that it takes.
    assert policy.residual is not None
    if depends_on(lambda q: keep(queries=queries._replace(q=q)), {"q": queries.q}):
        raise ValueError(
            f"residual {label_of(policy.residual)} matches queries of a text, which a cache does not hold; give "
            "kvjax.compress a text, such as the context again."
        )


def stored(pressed: Pressed, decoder: Bound, longest: int) -> dict[str, Any]:
    """Return the fields `layers` and `pool` of a cache of texts of up to `longest` tokens after `press`.

    Raises:
        ValueError: a score is NaN.
    """
    layers, undefined = pressed
    if on_host(undefined).any():
        raise ValueError(
            f"{type(decoder.policy.score).__name__}.score gives NaN for tokens of a text; a score has to give numbers, "
            "or -inf, +inf."
        )
    return on_pages(layers, decoder.policy, page_slots(longest), decoder.mesh)


def on_pages(layers: Caches, policy: Policy, page_size: int, mesh: Mesh | None) -> dict[str, Any]:
    """Return the fields `layers` and `pool` of a cache: selected tokens are packed into pages, other layers stay."""
    chosen = {index: layer for index, layer in enumerate(layers) if isinstance(layer, Selected)}
    selected = tuple(chosen.values())
    if not selected:
        return {"layers": layers, "pool": None}
    # Read the sizes on the host; one program then moves the tokens.
    spare = policy.evict_every - 1
    limits = np.stack([on_host(layer.view.limit) for layer in selected]) + spare
    devices = (1, 1) if mesh is None else (mesh.shape[ROWS], mesh.shape[HEADS])
    *tables, max_slots = table(limits, page_size, devices)
    sizes: dict[str, Any] = dict(page_size=page_size, max_slots=max_slots, spare=spare, devices=devices)
    pages, pool = pack_pages(selected, *map(jnp.asarray, tables), **sizes, mesh=mesh)
    packed = dict(zip(chosen, pages, strict=True))
    return {"layers": tuple(packed.get(index, layer) for index, layer in enumerate(layers)), "pool": pool}


@functools.partial(jax.jit, static_argnames=("page_size", "max_slots", "spare", "devices", "mesh"))
def pack_pages(selected: tuple[Selected, ...], *tables: Array, mesh: Mesh | None, **sizes: Any) -> tuple[Caches, Pool]:
    def specs() -> tuple[PyTree, PyTree]:
        static = {name: size for name, size in sizes.items() if name != "page_size"}
        pool: Any = Pool(*[OF_POOL] * 5, layers=len(selected), **static)
        return ((Selected.specs,) * len(selected), *(OF_POOL,) * 3), page_specs(pool, len(selected))

    return on_mesh(functools.partial(pack, **sizes), mesh, specs)(selected, *tables)
