"""JAX's strict modes, which hold in a user's code and not in kvjax's programs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.generation.generate import generate_ids
from kvjax.serving.requests import Request
from kvjax.serving.scheduler import Device
from tests.cases import core, slow
from tests.small_models import GQA, random_model

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "transfers": lambda: jax.transfer_guard("disallow"),
}
POLICIES = {
    "full": kvjax.policy("full"),
    "h2o of int8": kvjax.policy("h2o", codec="int8"),
    "pages with biases": kvjax.policy("h2o", residual="attention_matching", plan="adakv"),
    "positions in the cache": kvjax.policy("keyformer", positions="cache"),
}
PROMPTS = np.random.default_rng(0).integers(0, 64, (2, 24)).tolist()
MODEL = random_model(GQA)


def logits_of(policy: kvjax.Policy, model: kvjax.Model, tokens: jax.Array) -> list[jax.Array]:
    budget = 1.0 if policy.plan.sizing.mode == "unbounded" else 12
    state, prompt = kvjax.prefill(model, policy, PROMPTS, budget, max_new_tokens=8)
    state, first = kvjax.decode_step(state, tokens)
    state, second = kvjax.decode_step_in_place(state, [3, 4])
    _, third = jax.jit(lambda decoder, cache, token: decoder.step(cache, token))(state.decoder, state.cache, tokens)
    _, turn = kvjax.extend(state, [[1, 2, 3], [4]])
    return [prompt, first, second, third, turn]


@pytest.mark.parametrize(
    "name", [core("h2o of int8"), "pages with biases", slow("full"), slow("positions in the cache")]
)
def test_texts_are_read_under_strict_modes(name: str) -> None:
    tokens = jnp.asarray([1, 2], jnp.int32)
    expected = logits_of(POLICIES[name], MODEL, tokens)
    for mode in MODES.values():
        with mode():
            found = logits_of(POLICIES[name], MODEL, tokens)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("mode", MODES)
def test_texts_are_generated_and_served_under_strict_modes(mode: str) -> None:
    settings: dict[str, Any] = dict(policy="h2o", budget=12, max_new_tokens=6, top_k=4, top_p=0.9)
    expected = generate_ids(MODEL, PROMPTS, **settings).tokens
    with MODES[mode]():
        assert generate_ids(MODEL, PROMPTS, **settings).tokens == expected
        device = Device(MODEL, "h2o", 12, rows=1, context=64, chunk=32, steps=2)
        request = Request(tuple(PROMPTS[0]), max_tokens=2)
        device.put(0, *device.read(device.begin(device.plan(request)), PROMPTS[0]), request)
        assert device.write({0}, 2)[0].counts.tolist() == [2]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float32)])
def test_models_of_fewer_bits_are_read_in_64_bit_jax(dtype: Any, x64: None) -> None:
    logits = logits_of(POLICIES["pages with biases"], random_model(GQA, dtype=dtype), jnp.asarray([1, 2], jnp.int32))
    assert all(each.dtype == jnp.float32 and np.isfinite(each).all() for each in logits)
