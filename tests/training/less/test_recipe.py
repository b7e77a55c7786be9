"""LESS's training by numbers that it does not make itself: what is learned from, the loss, the rate, what is kept."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.inference.prepare import bind_policy
from kvjax.inference.shapes import empty_state
from kvjax.methods.less.feature_maps import Phi, Psi, init_kernels
from kvjax.model import Model
from kvjax.training.less.loss import output_projections
from kvjax.training.less.recipe import Recipe
from kvjax.training.less.record import Features, record
from kvjax.training.less.run import held_out_errors
from kvjax.training.less.train import mean_error, split_texts, train, training_mesh
from tests.methods.less.test_less import HIDDEN, kernels_for
from tests.oracles import less, less_training
from tests.small_models import GQA, sharp_model

N, BUDGET, LONGER = 40, 12, 8
WILD = Recipe(hidden=HIDDEN, epochs=5, batch=1, held_out=0.5, rate=0.3)
TOKENS = np.random.default_rng(3).integers(0, 64, (2, N))


def layer_of(kernels: Any, layer: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[layer], kernels)


def recorded(model: Model) -> tuple[Features, np.ndarray]:
    """What H2O's decoding leaves of two texts, and the positions that leave [L b h n]."""
    policy = bind_policy(model, kvjax.policy("h2o"), BUDGET, None)
    features, left = record(empty_state(model, policy, 2, N, BUDGET), jnp.asarray(TOKENS, jnp.int32))
    return features, np.asarray(left)


@functools.cache
def read(dtype: str = "float64") -> tuple[Any, list[list[Any]], list[list[list[list[int]]]]]:
    """Weights, for each text what the layers see of it, and for each text, layer and head what leaves."""
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), sharp_model(GQA, dtype, LONGER).weights)
    prompts = [less_training.read(weights, GQA, text.tolist()) for text in TOKENS]
    heads = range(GQA.kv_heads)
    left = [[[less_training.h2o(seen, h, BUDGET, BUDGET // 2) for h in heads] for seen in text] for text in prompts]
    return weights, prompts, left


def literal_loss(text: int, kernels: Any, dtype: str = "float64") -> np.ndarray:
    """The loss of each layer on a text, token by token; without kernels that of the policy alone."""
    weights, prompts, left = read(dtype)
    made = []
    for layer in range(GQA.layers):
        of_layer = None if kernels is None else layer_of(kernels, layer)
        output = weights.layers[layer].mixer.output.weight
        total, numbers = less_training.loss(prompts[text][layer], left[text][layer], of_layer, output)
        assert numbers == (N - BUDGET) * GQA.width  # of the first BUDGET tokens nothing is missing
        made.append(total / numbers)
    return np.array(made)


def test_learns_from_what_leaves_in_decoding(x64: None) -> None:
    features, positions = recorded(sharp_model(GQA, longer=LONGER))
    _, prompts, left = read()
    for text, layer in np.ndindex(len(TOKENS), GQA.layers):
        prompt = prompts[text][layer]
        assert positions[layer, text].tolist() == left[text][layer]
        for h in range(GQA.kv_heads):
            gone = np.array(left[text][layer][h])
            np.testing.assert_array_equal(features.leaving[layer, text, h], gone >= 0)
            for ours, theirs in ((features.k, prompt.keys[h]), (features.v, prompt.values[h])):
                np.testing.assert_allclose(
                    ours[layer, text, h], np.where(gone[:, None] >= 0, theirs[gone], 0), atol=1e-9
                )
            for g, queries in enumerate(prompt.queries[h]):
                np.testing.assert_allclose(features.q[layer, text, h, g], queries, atol=1e-9)
                full = prompt.probs[h][g] @ prompt.values[h]
                np.testing.assert_allclose(features.full[layer, text, h, g], full, atol=1e-9)


@pytest.mark.parametrize("scale", [None, 3.0])
def test_the_loss_is_of_positions_where_something_has_left(scale: float | None, x64: None) -> None:
    """Section 3.2 against a walk through the text: from the token on for which the first one leaves."""
    model = sharp_model(GQA, longer=LONGER)
    features, recipe = recorded(model)[0], Recipe(hidden=HIDDEN)
    kernels = None if scale is None else kernels_for(GQA, scale)
    for texts in (range(2), range(1, 2)):
        found = mean_error(kernels, features, texts, output_projections(model), recipe, training_mesh(GQA))
        np.testing.assert_allclose(found, np.mean([literal_loss(text, kernels) for text in texts], 0), rtol=1e-6)


def one_text_twice(model: Model) -> Features:
    """To be trained on and held out."""
    return jax.tree.map(lambda leaf: jnp.concatenate([leaf[:, :1], leaf[:, :1]], 1), recorded(model)[0])


def test_dropout_is_for_training_alone(tmp_path: Path) -> None:
    """What an epoch's kernels leave where they choose is literal; where they go on to train something is dropped."""
    model = sharp_model(GQA, jnp.float32, LONGER)
    features = one_text_twice(model)
    kernels = train(model, features, tmp_path, WILD, epochs=1).params
    losses = np.asarray(train(model, features, tmp_path, WILD, epochs=2).losses)
    np.testing.assert_allclose(losses[:, 0, 1], literal_loss(0, kernels, "float32"), rtol=1e-4)
    assert (np.abs(losses[:, 1, 0] / losses[:, 0, 1] - 1) > 1e-3).all()


def test_the_recipe_is_the_papers() -> None:
    told = Recipe()
    assert (told.features, told.hidden, told.dropout, told.batch) == (8, 512, 0.3, 2)
    assert (told.epochs, told.rate, told.halve_every) == (40, 1e-3, 10)
    learn, held = split_texts(512, told)
    assert (len(learn), len(held)) == (461, 51) and sorted([*learn, *held]) == list(range(512))


def test_kernels_begin_as_the_sparse_policy_almost() -> None:
    """Scalars of 1e-4 (section 3.2), one for each head and feature, and matrices that Xavier's bound fills evenly."""
    made = jax.device_get(init_kernels(jax.random.key(0), GQA))
    h, g, d, layers = GQA.kv_heads, GQA.groups, GQA.head_width, GQA.layers
    for name in ("outer_scale", "residual_scale"):
        np.testing.assert_array_equal(made["psi"][name], np.full((layers, h, 8), 1e-4, np.float32))
    shapes = {
        "phi": {"first": (h, g, d, 512), "second": (h, g, 512, 8)},
        "psi": {"first": (h, d, 512), "second": (h, 512, 8), "third": (h, 8, 8)},
    }
    for kernel, matrices in shapes.items():
        for name, shape in matrices.items():
            drawn, bound = made[kernel][name], np.sqrt(6 / sum(shape[-2:]))
            assert drawn.shape == (layers, *shape)
            assert 0.9 * bound < np.abs(drawn).max() <= bound
            np.testing.assert_allclose(drawn.var(), bound**2 / 3, rtol=0.2)
            heads = drawn.reshape(-1, *shape[-2:])
            assert len({head.tobytes() for head in heads}) == len(heads)  # no two are drawn alike


@pytest.mark.parametrize("kernel", ["phi", "psi"])
def test_dropout_is_before_the_first_activation(kernel: str) -> None:
    """With a second layer that changes nothing each hidden number shows: dropped, or what it would be times 1 / 0.7."""
    hidden, rng = 64, np.random.default_rng(0)
    heads, axes = (2, 2) if kernel == "phi" else (2,), (1, 2, 2, 50, 8) if kernel == "phi" else (1, 2, 50, 8)
    x, first = rng.normal(size=axes), rng.normal(size=(*heads, 8, hidden))
    same = np.broadcast_to(np.eye(hidden), (*heads, hidden, hidden))
    params = {"first": jnp.asarray(first, jnp.float32), "second": jnp.asarray(same, jnp.float32)}
    if kernel == "psi":
        ones, none = jnp.ones((2, hidden)), jnp.zeros((2, hidden))
        params |= {"third": params["second"], "outer_scale": ones, "residual_scale": none}
    module = {"phi": Phi, "psi": Psi}[kernel](hidden, hidden, 0.3)
    found = module.apply(
        {"params": params}, jnp.asarray(x, jnp.float32), train=True, rngs={"dropout": jax.random.key(0)}
    )
    kept = np.abs(less.gelu(less.gelu(x @ first / 0.7)))
    dropped = np.asarray(found) == 0
    np.testing.assert_allclose(dropped.mean(), 0.3, atol=0.02)
    np.testing.assert_allclose(found, np.where(dropped, 0, kept), atol=1e-5)


def test_the_rate_is_halved_when_the_recipe_says(tmp_path: Path) -> None:
    """A step of Adam is as long as its rate while the gradient stays: at rates so low that it does."""
    model, rate = sharp_model(GQA, jnp.float32, LONGER), 1e-7
    recipe = Recipe(hidden=HIDDEN, dropout=0.0, epochs=5, held_out=0.3, rate=rate, halve_every=2)
    features = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[:, :1]], 1), recorded(model)[0])
    states = [train(model, features, tmp_path, recipe, epochs=epochs) for epochs in range(recipe.epochs + 1)]
    scales = [np.asarray(state.params["psi"]["outer_scale"], np.float64) for state in states]
    steps = [np.abs(after - before) for before, after in itertools.pairwise(scales)]
    for step, expected in zip(steps, [1, 1, 0.5, 0.5, 0.25], strict=True):
        np.testing.assert_allclose(step.max(), expected * rate, rtol=0.02)
    # Kernels that hardly change have one loss: two texts are in the batch of an epoch, the first one is held out again.
    first, second = (literal_loss(text, states[0].params, "float32") for text in range(2))
    for losses in np.asarray(states[-1].losses).transpose(1, 2, 0):
        np.testing.assert_allclose(losses, [(first + second) / 2, first], rtol=1e-4)


def opposed_features(model: Model, n: int) -> Features:
    """Numbers by chance: a text to learn from, and one that looks the same, of which too much is made by and by.

    What the second one lacks is nothing in the first layer, and a tenth of what the other lacks in the second.
    """
    config, rng = model.config, np.random.default_rng(0)
    of_keys = config.layers, 1, config.kv_heads, n, config.head_width
    of_queries = *of_keys[:3], config.groups, n, config.head_width
    shapes = dict(q=of_queries, k=of_keys, v=of_keys, sparse=of_queries, full=of_queries, lse=of_queries[:-1])
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    arrays["leaving"] = np.broadcast_to(np.where(np.arange(n) > 2, 1.0, 0.0), of_keys[:-1])
    twice = {name: np.concatenate([array, array], 1).astype(np.float32) for name, array in arrays.items()}
    lacking = arrays["full"] - arrays["sparse"]
    share = np.array([0.0, 0.1]).reshape(2, 1, 1, 1, 1)
    twice["full"][:, 1] = (arrays["sparse"] + share[..., None] * lacking)[:, 0]
    return Features(**{name: jnp.asarray(array) for name, array in twice.items()})


def test_each_layer_keeps_the_kernels_of_its_best_epoch(tmp_path: Path) -> None:
    """Held-out errors, each measured anew from its epoch's kernels, rise from another epoch on in each layer."""
    model = sharp_model(GQA, jnp.float32, LONGER)
    features, held = opposed_features(model, N), split_texts(2, WILD)[1]
    states = [train(model, features, tmp_path, WILD, epochs=epochs) for epochs in range(1, WILD.epochs + 1)]
    measured = np.array(
        [
            mean_error(state.params, features, held, output_projections(model), WILD, training_mesh(GQA))
            for state in states
        ]
    )
    np.testing.assert_allclose(np.asarray(states[-1].losses)[..., 1].T, measured, rtol=1e-5)
    best = measured.argmin(0)
    assert (best < WILD.epochs - 1).all() and (measured[-1] > measured.min(0)).all()
    for layer, epoch in enumerate(best):
        ours, theirs = layer_of(states[-1].best, layer), layer_of(states[epoch].params, layer)
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    rows = held_out_errors(model, features, states[-1], WILD, jnp.float32)
    assert [row["best_epoch"] for row in rows] == (best + 1).tolist()
    np.testing.assert_allclose([row["after"] for row in rows], measured.min(0), rtol=1e-6)
