"""Training of the kernels of all layers, each against its own layer's attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Key

from kvjax.methods.less.feature_maps import Params, init_kernels
from kvjax.model import Model
from kvjax.models.config import ModelConfig
from kvjax.models.sharding import MESH_AXES, mesh_of, program_mesh
from kvjax.training import checkpoints
from kvjax.training.less.loss import Projection, Projections, memory_attention, output_projections, squared_error
from kvjax.training.less.recipe import Recipe
from kvjax.training.less.record import Features

DATA, MODEL, _ = MESH_AXES

OF_LAYERS = PartitionSpec(MODEL)
"""Sharding of arrays [L ...] on a `training_mesh`."""

OF_TEXTS = PartitionSpec(MODEL, DATA)
"""Sharding of arrays [L b ...] on a `training_mesh`."""


class Training(struct.PyTreeNode):
    """Training state; all arrays have a leading axis of layers."""

    params: Params
    optimiser: Any
    best: Params
    """Kernels of the best epoch so far."""
    lowest_error: Float[Array, " L"]
    """Error of the best kernels on the held-out texts."""
    losses: Float[Array, "L epoch 2"]
    """Mean squared error on training (with dropout) and on held-out texts, after each epoch done."""
    epoch: Int[Array, " L"]
    """Epochs done."""


def check_batch(batch: int, mesh: Mesh | None) -> None:
    """Refuse a batch that the mesh's `data` axis cannot shard evenly."""
    along = 1 if mesh is None else mesh.shape.get(DATA, 1)
    if batch % along:
        raise ValueError(
            f"batch={batch} texts cannot be sharded evenly over data={along}; use batch={-(-batch // along) * along}."
        )


def training_mesh(config: ModelConfig, mesh: Mesh | None = None) -> Mesh:
    """Return the mesh of the training, with layers sharded over `model` and texts of a batch over `data`.

    Args:
        mesh: a mesh with the axes `MESH_AXES`; None for all devices along `model`. The `model` axis is reduced to the
            largest size that divides the number of layers.
    """
    devices = np.array(jax.devices())[None]
    if mesh is not None:
        rows = program_mesh(config, mesh).devices
        devices = rows.reshape(len(rows), -1)
    count = max(count for count in range(1, devices.shape[1] + 1) if config.layers % count == 0)
    chosen = devices[:, :count]
    return mesh_of(chosen.ravel().tolist(), chosen.shape)


def _over_layers(mesh: Mesh, function: Callable[..., Any], in_specs: tuple[PartitionSpec, ...], *stacked: Any) -> Any:
    # Layers run in turn on each device: faster than vmap, whose hidden features do not fit the processor's cache.
    mapped = jax.shard_map(
        lambda *local: jax.lax.map(lambda layer: function(*layer), local),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=OF_LAYERS,
        check_vma=False,
    )
    return mapped(*stacked)


@functools.partial(jax.jit, static_argnames=("recipe", "mesh"), donate_argnums=(0, 1))
def _step(
    params: Params,
    optimiser: Any,
    features: Features,
    projection: Projections,
    rate: float,
    key: Key[Array, ""],
    *,
    recipe: Recipe,
    mesh: Mesh,
) -> tuple[Params, Any, Float[Array, " L"]]:
    def layer(
        params: Params,
        optimiser: Any,
        features: Features,
        projection: Projection,
        rate: Float[Array, ""],
        keys: Key[Array, " b"],
    ) -> tuple[Params, Any, Float[Array, ""]]:
        def loss(params: Params, text: Features, key: Key[Array, ""]) -> tuple[Float[Array, ""], Int[Array, ""]]:
            text = jax.tree.map(lambda leaf: leaf[None], text)
            return squared_error(memory_attention(params, recipe, text, key), text, projection)

        # Texts run in turn, so the dropout of a text does not depend on the other texts of its device.
        gradient = jax.value_and_grad(loss, has_aux=True)
        of_texts = jax.lax.map(lambda text: gradient(params, *text), (features, keys))
        (total, numbers), gradients = jax.lax.psum(jax.tree.map(lambda leaf: leaf.sum(0), of_texts), DATA)
        error, gradients = jax.tree.map(lambda leaf: leaf / jnp.maximum(numbers, 1), (total, gradients))
        updates, optimiser = optax.scale_by_adam().update(gradients, optimiser)
        return optax.apply_updates(params, jax.tree.map(lambda u: -rate * u, updates)), optimiser, error

    layers, batch = features.q.shape[:2]
    keys, rates = jax.random.split(key, (layers, batch)), jnp.full(layers, rate)
    in_specs = OF_LAYERS, OF_LAYERS, OF_TEXTS, OF_LAYERS, OF_LAYERS, OF_TEXTS
    return _over_layers(mesh, layer, in_specs, params, optimiser, features, projection, rates, keys)


@functools.partial(jax.jit, static_argnames=("recipe", "mesh"))
def _errors(
    params: Params | None, rows: Features, projection: Projections, *, recipe: Recipe, mesh: Mesh
) -> tuple[Float[Array, " L"], Int[Array, " L"]]:
    def layer(params: Params | None, rows: Features, projection: Projection) -> tuple[Float[Array, ""], Int[Array, ""]]:
        out = rows.sparse if params is None else memory_attention(params, recipe, rows)
        return jax.lax.psum(squared_error(out, rows, projection), DATA)

    return _over_layers(mesh, layer, (OF_LAYERS, OF_TEXTS, OF_LAYERS), params, rows, projection)


def mean_error(
    params: Params | None, features: Features, texts: range, projection: Projections, recipe: Recipe, mesh: Mesh
) -> Float[np.ndarray, " L"]:
    """Return the mean squared error of each layer on some of the texts; `params` is None for the policy alone."""
    total, numbers = np.zeros((2, len(projection)))
    for rows in batches(features, np.asarray(texts), recipe.batch, mesh, drop_last=False):
        error, count = _errors(params, rows, projection, recipe=recipe, mesh=mesh)
        total, numbers = total + np.asarray(error, np.float64), numbers + np.asarray(count)
    return total / np.maximum(numbers, 1)


def batches(features: Features, order: np.ndarray, batch: int, mesh: Mesh, drop_last: bool) -> Iterator[Features]:
    """Yield batches of texts in an order; a smaller last one is dropped if `drop_last`, or else padded for the mesh."""
    stop = len(order) - len(order) % batch if drop_last else len(order)
    for first in range(0, stop, batch):
        chosen = np.sort(order[first : first + batch])
        missing = -len(chosen) % mesh.shape[DATA]
        read = jax.tree.map(functools.partial(_texts, chosen=chosen, missing=missing), features)
        yield jax.device_put(read, NamedSharding(mesh, OF_TEXTS))


def _texts(leaf: Array, *, chosen: np.ndarray, missing: int) -> np.ndarray:
    read = np.asarray(leaf[:, chosen])
    return np.pad(read, [(0, 0), (0, missing), *[(0, 0)] * (read.ndim - 2)]) if missing else read


def split_texts(texts: int, recipe: Recipe) -> tuple[range, range]:
    """Return the indices of the training texts and of the held-out ones, which are the last."""
    count = max(1, round(recipe.held_out * texts))
    if texts - count < recipe.batch:
        raise ValueError(
            f"{texts} texts less {count} held out do not make one batch of {recipe.batch}; use more texts or batch=1."
        )
    return range(texts - count), range(texts - count, texts)


def train(
    model: Model,
    features: Features,
    directory: Path,
    recipe: Recipe,
    *,
    mesh: Mesh | None = None,
    epochs: int | None = None,
    show: Callable[[int, Float[np.ndarray, "L 2"]], None] = lambda epoch, losses: None,
) -> Training:
    """Train the kernels of all layers, or resume the run in this directory; each epoch saves a checkpoint.

    The order of the texts and the dropout depend only on seed, epoch and step. A resumed run therefore ends with the
    same kernels as an uninterrupted one, or on other devices with the same up to rounding. A completed run continues
    if the recipe has more epochs.

    Args:
        epochs: stop after this many; the run can be resumed later. None for the recipe's.
        show: called with the epochs done and the losses of the last one.

    Raises:
        FloatingPointError: a loss is not finite.
        ValueError: the batch does not fit the mesh, the mesh has other axes, or there are too few texts.
    """
    layers, texts = features.q.shape[:2]
    learn, held_out_texts = split_texts(texts, recipe)
    check_batch(recipe.batch, mesh)
    mesh = training_mesh(model.config, mesh)
    sharding = NamedSharding(mesh, OF_LAYERS)
    shape: dict[str, Any] = {name: getattr(recipe, name) for name in ("features", "hidden", "literal")}
    params = init_kernels(jax.random.key(recipe.seed), model.config, **shape)
    training = Training(
        params=params,
        optimiser=jax.vmap(optax.scale_by_adam().init)(params),
        best=jax.tree.map(jnp.copy, params),
        lowest_error=jnp.full(layers, jnp.inf, jnp.float32),
        losses=jnp.zeros((layers, checkpoints.newest_step(directory), 2), jnp.float32),
        epoch=jnp.zeros(layers, jnp.int32),
    )
    training = jax.device_put(training, sharding)
    training = checkpoints.restore(directory, training) or training
    projection = jax.device_put(output_projections(model), sharding)
    params, optimiser = training.params, training.optimiser
    last = recipe.epochs if epochs is None else min(epochs, recipe.epochs)
    for epoch in range(int(training.epoch[0]), last):
        order = np.random.default_rng((recipe.seed, epoch)).permutation(np.asarray(learn))
        key = jax.random.fold_in(jax.random.key(recipe.seed + 1), epoch)
        rate = recipe.rate * 0.5 ** (epoch // recipe.halve_every)
        errors = []
        for step, rows in enumerate(batches(features, order, recipe.batch, mesh, drop_last=True)):
            step_key = jax.random.fold_in(key, step)
            params, optimiser, error = _step(
                params, optimiser, rows, projection, rate, step_key, recipe=recipe, mesh=mesh
            )
            errors.append(error)
        held_out = mean_error(params, features, held_out_texts, projection, recipe, mesh).astype(np.float32)
        losses = np.stack([np.mean(np.stack(errors), axis=0), held_out], axis=-1)
        if not np.isfinite(losses).all():
            raise FloatingPointError(f"the losses became {losses.tolist()} in epoch {epoch + 1}; use a smaller rate.")
        better = jax.device_put(held_out < np.asarray(training.lowest_error), sharding)
        training = training.replace(
            params=params,
            optimiser=optimiser,
            best=_choose(better, params, training.best),
            lowest_error=jnp.where(better, held_out, training.lowest_error),
            losses=jnp.concatenate([training.losses, losses[:, None]], axis=1),
            epoch=training.epoch + 1,
        )
        checkpoints.save_step(directory, training, epoch + 1)
        params, optimiser = jax.tree.map(jnp.copy, (params, optimiser))  # a step donates its arguments
        show(epoch + 1, losses)
    return training


@jax.jit
def _choose(better: Array, new: Params, old: Params) -> Params:
    return jax.tree.map(lambda a, b: jnp.where(better.reshape(-1, *(1,) * (a.ndim - 1)), a, b), new, old)
