"""Derivatives of what a model computes over a cache: forwards, backwards and by finite differences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models.config import ModelConfig
from pallas_kernels.attention import AttentionSpec
from pallas_kernels.operands import SplitKV
from pallas_kernels.prefill_attention import prefill_attention
from tests.cases import pairwise, slow
from tests.small_models import GQA, LOCAL, SLOPED, random_model

IDS = [[5, 9, 2, 7, 7, 1, 30, 22, 11, 4, 6, 8, 19, 40], [3, 1, 4, 1, 5]]
TURN = [[2, 7, 1], [8, 2, 8]]
Loss = Callable[[Any], Any]


def agree(loss: Loss, at: Any, seed: int = 0) -> float:
    """Compare a loss's derivative along a random direction, backwards and forwards, with its finite difference."""
    rng = np.random.default_rng(seed)
    along = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), at)

    def beside(step: float) -> Any:
        return loss(jax.tree.map(lambda leaf, other: leaf + step * other, at, along))

    backwards = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, jax.grad(loss)(at), along)))
    forwards = jax.jvp(loss, (at,), (along,))[1]
    differences = (beside(1e-6) - beside(-1e-6)) / 2e-6
    np.testing.assert_allclose(backwards, forwards, rtol=1e-9)
    np.testing.assert_allclose(backwards, differences, rtol=1e-5)
    return float(backwards)


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        ("full", {}),
        ("h2o", {"budget": 6}),
        slow("keyformer", {"budget": 6}),
        ("keyformer", {"budget": 6, "settings": {"noise": "gaussian", "positions": "cache"}}),
        slow("tova", {"budget": 6}),
        slow("streaming", {"budget": 6}),
        ("l2", {"budget": 6}),
        slow("less", {"budget": 6, "settings": {"kernels": "performer"}}),
        slow("topk_oracle", {}),
    ],
)
def test_of_prompts_turns_and_steps(policy: str, settings: dict[str, Any], x64: None) -> None:
    model = random_model(GQA, dtype=jnp.float64)
    made = kvjax.policy(policy, **settings.get("settings", {}))
    given: dict[str, Any] = {name: value for name, value in settings.items() if name == "budget"}

    def of_weights(weights: Any) -> Any:
        changed = kvjax.Model(weights, model.config, "changed")
        state, prompt = kvjax.prefill(changed, made, IDS, max_new_tokens=9, **given)
        state, step = kvjax.decode_step(state, [3, 4])
        _, turn = kvjax.extend(state, TURN)
        return sum(jnp.sin(logits).sum() for logits in (prompt, step, turn))

    assert agree(of_weights, model.weights) != 0


@pytest.mark.parametrize(
    "config", [LOCAL, SLOPED, slow(dataclasses.replace(GQA, layers=13))], ids=["window", "alibi", "deep"]
)
def test_of_models_of_other_kinds(config: ModelConfig, x64: None) -> None:
    model = random_model(config, dtype=jnp.float64)

    def of_weights(weights: Any) -> Any:
        return jnp.sin(kvjax.prefill(kvjax.Model(weights, config, "changed"), "h2o", IDS, 6)[1]).sum()

    agree(of_weights, model.weights)


def test_a_prompt_has_the_derivative_of_the_model_without_a_cache(x64: None) -> None:
    model = random_model(GQA, dtype=jnp.float64)

    def last(weights: Any, cached: bool) -> Any:
        changed = kvjax.Model(weights, model.config, "changed")
        return kvjax.prefill(changed, "h2o", IDS[:1], 6)[1][0, 3] if cached else changed.logits(IDS[:1])[0, -1, 3]

    ours, plain = (jax.grad(last)(model.weights, cached) for cached in (True, False))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10), ours, plain)


@pytest.mark.parametrize(("tau", "noisy", "rows"), pairwise([1.0, 0.7], [False, True], [None, 3]))
def test_of_statistics_of_attention(tau: float, noisy: bool, rows: int | None, x64: None) -> None:
    b, h, g, n, d, before = 2, 2, 2, 11, 4, 5
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(b, h, *s, d))) for s in ((g, n), (before + n,), (before + n,)))
    place = jnp.broadcast_to(jnp.arange(before, before + n), (b, n))
    keys = jnp.concatenate([jnp.broadcast_to(jnp.arange(before), (b, before)), place], 1)[:, None]
    noise = jnp.asarray(rng.gumbel(size=keys.shape)) if noisy else None
    weights = None if rows is None else jnp.asarray(rng.random((b, 1, rows, n)))
    query_position = place.at[1, -4:].set(-1)
    keys = jnp.broadcast_to(keys, (b, h, before + n)).at[1, :, -4:].set(-1)
    noise = None if noise is None else jnp.broadcast_to(noise, keys.shape)

    def of(arrays: Any) -> Any:
        q, k, v = arrays
        keys_of, values_of = (SplitKV(x[:, :, :before], x[:, :, before:]) for x in (k, v))
        found = prefill_attention(
            q, keys_of, values_of, query_position, keys, AttentionSpec(0.5), weights=weights, noise=noise, tau=tau
        )
        assert found.scores is not None
        lse = jnp.where(jnp.isfinite(found.lse), found.lse, 0)
        return jnp.sin(found.out).sum() + jnp.sin(lse).sum() + jnp.sin(3 * found.scores).sum()

    agree(of, (q, k, v))


def test_of_what_a_cache_holds(x64: None) -> None:
    state, _ = kvjax.prefill(random_model(GQA, dtype=jnp.float64), "h2o", IDS, 6, max_new_tokens=4)

    def of_pairs(pairs: Any) -> Any:
        views = [view.replace(kv=kv) for view, kv in zip(state.cache.slots, pairs, strict=True)]
        changed = state.replace(layers=tuple(views))
        return jnp.sin(kvjax.decode_step(changed, [3, 4])[1]).sum()

    assert agree(of_pairs, [view.kv for view in state.cache.slots]) != 0
