"""Eviction in all layers of a filled cache, after the text has been read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.dense import Dense
from kvjax.cache.evict import foreseen
from kvjax.cache.paged import build
from kvjax.cache.paged.build import Selected
from kvjax.cache.paged.storage import Paged
from kvjax.cache.paged.table import table
from kvjax.inference.allocate import allocated, allocated_together
from kvjax.inference.cache import Cache, cache_specs
from kvjax.inference.keep import Kept, keep_best
from kvjax.inference.padding import among_devices, round_slots
from kvjax.inference.prepare import Prompts
from kvjax.inference.sharding import (
    OF_HEADS,
    OF_POOL,
    OF_ROWS,
    OF_SELECTED,
    joined,
    on_mesh,
    policy_specs,
    pool_specs,
    read_specs,
    shared,
)
from kvjax.models.config import ModelConfig
from kvjax.models.sharding import on_device
from kvjax.policies.allocation import Uniform
from kvjax.policies.policy import Policy
from kvjax.policies.residual import Queries
from kvjax.policies.stats import questions
from kvjax.types import HEADS, ROWS, Kernels, New, View
from kvjax.utils.dependence import depends_on
from kvjax.utils.processes import on_host

Pressed = tuple[Dense | tuple[Selected, ...], Bool[Array, " b"]]
"""Storage (or selected slots, under plans with slots for each head), and a mask of rows with scores of NaN."""

Asking = tuple[tuple[Float[Array, "b h g n d"], ...], Bool[Array, "b n"]]
"""Queries of each layer that stand for later ones, and a mask of those that are no padding."""


def asking_specs(asking: Asking | None) -> Any:
    """Return the specs of queries on a mesh."""
    return None if asking is None else ((OF_HEADS,) * len(asking[0]), OF_ROWS)


def check_no_queries(policy: Policy, keep: Callable[..., Any], queries: Queries) -> None:
    """Refuse a residual that depends on queries where there are none.

    Args:
        policy: the policy.
        keep: evicts, given queries.
        queries: of the shapes that it takes.

    Raises:
        ValueError: the result depends on them.
    """
    if depends_on(lambda q: keep(queries=queries._replace(q=q)), {"q": queries.q}):
        raise ValueError(
            f"{type(policy.residual).__name__} matches queries of a text, which a cache does not hold; give "
            "kvjax.compress a text, such as the context again."
        )


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


def check_ranked(ranked: Pressed, policy: Policy) -> None:
    """Refuse scores of NaN.

    Raises:
        ValueError: the score returned NaN.
    """
    if on_host(ranked[1]).any():
        raise ValueError(
            f"{type(policy.score).__name__}.score gives NaN for tokens of a text; a score has to give numbers, or "
            "-inf, +inf."
        )


@functools.partial(jax.jit, static_argnames=("config", "kernels", "mesh", "dtype", "capacities"))
def press(
    policy: Policy,
    cache: Cache,
    limits: tuple[Int[Array, "b h"], ...],
    *,
    config: ModelConfig,
    kernels: Kernels,
    mesh: Mesh | None,
    dtype: DTypeLike,
    capacities: tuple[int, ...],
    asking: Asking | None = None,
) -> Pressed:
    """Evict the lowest-ranked slots of all heads, by the policy under which the cache was filled.

    Args:
        policy: policy, bound to the model.
        cache: cache without a random key, see `Cache.key`.
        limits: slots that each head may use, by layer.
        config: configuration of the model.
        kernels: implementation of every operation.
        mesh: devices that shard the cache; None for one device.
        dtype: dtype of the model's activations.
        capacities: slots of the buffers, by layer.
        asking: queries that stand for later ones; None if there are none.
    """

    def here(policy: Policy, cache: Cache, limits: tuple[Array, ...], asking: Asking | None) -> Pressed:
        reading, here = cache.newest.replace(kernels=kernels), on_device(config, mesh)
        x = jnp.zeros((*reading.token.shape, here.width), dtype)
        new = [reading.ahead(shape, index, x) for index, shape in enumerate(here.layer_configs)]
        views = joined(cache.storage, mesh).unpack().layers
        policies = [policy.layer(index) for index in range(here.layers)]
        if not foreseen(policies, views, new):
            raise ValueError(
                f"{named(policy)} ranks slots by the token that needs one, so it has no ranking before that token."
            )
        views = [view.replace(limit=limit) for view, limit in zip(views, limits, strict=True)]
        return kept_of_all(policies, views, new, capacities, mesh, asking)

    given = policy_specs(policy), cache_specs(cache), (OF_HEADS,) * len(limits), asking_specs(asking)
    return on_mesh(here, mesh, given, pressed_specs(policy, len(limits)))(policy, cache, limits, asking)


def pressed_specs(policy: Policy, layers: int) -> Any:
    """Return the specs of the results of `press`."""
    return read_specs(policy, layers), OF_ROWS


def kept_of_all(
    policies: Sequence[Policy],
    views: Sequence[View],
    new: Sequence[New],
    capacities: tuple[int, ...],
    mesh: Mesh | None,
    asking: Asking | None = None,
) -> Pressed:
    """Allocate slots to heads and keep the best tokens of all layers; a function of one device's shards.

    Args:
        policies: as each layer uses the policy.
        views: all slots of this device's heads.
        new: the tokens by which slots are ranked.
        capacities: slots of the buffers.
        mesh: devices that shard the cache; None for one device.
        asking: queries of each layer that stand for later ones; None if there are none.
    """
    for policy, view, tokens in zip(policies, views, new, strict=True):
        if questions(policy.plan.asks(view, tokens))[0]:
            raise ValueError(
                f"plan {type(policy.plan).__name__} needs attention of the text, which a cache does not hold."
            )
    sizing = policies[0].plan.sizing
    if sizing.all_layers:
        views = allocated_together(policies, views, new)
    else:
        given = zip(policies, views, new, strict=True)
        views = [allocated(policy, view, (), tokens) for policy, view, tokens in given]
    layers, found = list[View](), list[Kept]()
    layer = zip(policies, views, new, capacities, strict=True)
    for index, (policy, view, tokens, capacity) in enumerate(layer):
        keep = functools.partial(keep_best, policy, Dense((view,)), 0, tokens, capacity, first=True)
        queries = None if asking is None else Queries(asking[0][index], asking[1])
        if queries is None:
            check_no_queries(policy, keep, Queries(tokens.q, tokens.valid))
        storage, kept = keep(queries=queries)
        layers.append(storage.layers[0])
        found.append(kept)
    undefined = jnp.zeros(len(views[0].limit), bool)
    for kept in found:
        undefined = undefined if kept.undefined is None else undefined | kept.undefined
    if sizing.per_head:
        return tuple(kept.selected for kept in found if kept.selected is not None), undefined
    return shared(Dense(tuple(layers)), mesh), undefined


def named(policy: Policy) -> str:
    """Return the name of a policy in messages."""
    return policy.name or type(policy.score).__name__


def on_pages(selected: tuple[build.Selected, ...], policy: Policy, page_size: int, mesh: Mesh | None) -> Paged:
    """Pack the selected tokens of all layers into pages."""
    # Read the sizes on the host; one program then moves the tokens.
    spare = policy.evict_every - 1
    limits = np.stack([on_host(layer.view.limit) for layer in selected]) + spare
    devices = (1, 1) if mesh is None else (mesh.shape[ROWS], mesh.shape[HEADS])
    *tables, most = table(limits, page_size, devices)
    sizes: dict[str, Any] = dict(page_size=page_size, most=most, spare=spare, devices=devices)
    return pack_pages(selected, *map(jnp.asarray, tables), **sizes, mesh=mesh)


@functools.partial(jax.jit, static_argnames=("page_size", "most", "spare", "devices", "mesh"))
def pack_pages(selected: tuple[build.Selected, ...], *tables: Array, mesh: Mesh | None, **sizes: Any) -> Paged:
    given = (OF_SELECTED,) * len(selected), *(OF_POOL,) * 3
    made = pool_specs(len(selected), sizes["most"], sizes["spare"], sizes["devices"])
    return on_mesh(functools.partial(build.pack, **sizes), mesh, given, made)(selected, *tables)
