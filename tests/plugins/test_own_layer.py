"""A mixer and a layer cache that are written outside of kvjax work without a change inside."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jaxtyping import Array, Float, Int

import kvjax
from kvjax.cache.layer import LayerCache
from kvjax.inference.state import held_positions
from tests.small_models import GQA, random_model

TEXT = np.random.default_rng(0).integers(0, GQA.vocab_size, (2, 40))


class Sum(LayerCache):
    """Sum of a row's inputs, and their number."""

    total: Float[Array, "b width"]
    count: Int[Array, " b"]


class Mean(struct.PyTreeNode):
    """Mean of a row's inputs, projected."""

    output: Float[Array, "width width"]
    cache_kind = Sum

    def init_cache(self, tokens: Any, limit: Array, slots: int) -> Sum:
        return Sum(jnp.zeros((len(limit), len(self.output)), tokens.hidden.dtype), jnp.zeros(len(limit), jnp.int32))

    def __call__(self, x: Array, config: Any, cache: Sum, tokens: Any) -> tuple[Array, Sum]:
        valid = tokens.reading.valid
        sums = cache.total[:, None] + jnp.cumsum(jnp.where(valid[..., None], x, 0), axis=1)
        counts = cache.count[:, None] + jnp.cumsum(valid, axis=1)
        return sums / jnp.maximum(counts, 1)[..., None] @ self.output, Sum(sums[:, -1], counts[:, -1])


@pytest.fixture(scope="module")
def model() -> kvjax.Model:
    """A model whose first layer has no attention."""
    plain = random_model(GQA)
    first, *others = plain.weights.layers
    width = plain.config.width
    mixer = Mean(jax.random.normal(jax.random.key(1), (width, width)) / width)
    layers = (dataclasses.replace(first, mixer=mixer), *others)
    return kvjax.Model(dataclasses.replace(plain.weights, layers=layers), plain.config, name="mixed")


SETTINGS = [("full", {}), ("h2o", {"budget": 40}), ("h2o", {"budget": 40, "plan": "adakv"})]


@pytest.mark.parametrize(("policy", "settings"), SETTINGS)
def test_prompts_turns_and_steps_equal_the_whole_text(
    model: kvjax.Model, policy: str, settings: dict[str, Any]
) -> None:
    expected = np.asarray(model.logits(TEXT))
    state, logits = kvjax.prefill(model, policy, TEXT[:, :12], max_new_tokens=28, **settings)
    np.testing.assert_allclose(logits, expected[:, 11], rtol=1e-4, atol=1e-4)
    state, logits = kvjax.extend(state, TEXT[:, 12:20], lengths=[8, 3])
    np.testing.assert_allclose(logits[0], expected[0, 19], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(logits[1], expected[1, 14], rtol=1e-4, atol=1e-4)
    state, logits = kvjax.decode_step(state, [TEXT[0, 20], TEXT[1, 15]])
    np.testing.assert_allclose(logits[0], expected[0, 20], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(logits[1], expected[1, 15], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("policy", "settings"), [("h2o", {"budget": 10}), ("h2o", {"budget": 10, "plan": "adakv"})])
def test_rows_are_selected_and_replaced(model: kvjax.Model, policy: str, settings: dict[str, Any]) -> None:
    state, _ = kvjax.prefill(model, policy, TEXT[:, :20], max_new_tokens=4, **settings)
    swapped = kvjax.take_rows(state, [1, 0])
    one, other = (
        kvjax.decode_step(each, jnp.asarray(TEXT[order, 20])) for each, order in ((state, [0, 1]), (swapped, [1, 0]))
    )
    np.testing.assert_allclose(other[1], one[1][::-1], rtol=1e-5, atol=1e-5)
    put = kvjax.put_rows(state, [0], kvjax.take_rows(state, [1]))
    both = kvjax.decode_step(put, jnp.asarray(TEXT[[1, 1], 20]))[1]
    np.testing.assert_allclose(both, np.asarray(one[1])[[1, 1]], rtol=1e-5, atol=1e-5)
    assert all((layer >= 0).sum(-1).max() <= 20 for layer in held_positions(state))


def test_steps_compile_and_branch_as_others_do(model: kvjax.Model) -> None:
    state, _ = kvjax.prefill(model, "h2o", TEXT[:, :20], budget=10, max_new_tokens=4)
    tokens = jnp.asarray(TEXT[:, 20:24].T)
    _, scanned = jax.jit(lambda state, tokens: jax.lax.scan(kvjax.decode_step, state, tokens))(state, tokens)
    for token, logits in zip(tokens, scanned, strict=True):
        state, expected = kvjax.decode_step(state, token)
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


def test_the_cache_takes_the_bytes_of_its_arrays(model: kvjax.Model) -> None:
    state, _ = kvjax.prefill(model, "h2o", TEXT[:, :20], budget=10, max_new_tokens=4)
    assert type(state.layers[0]) is Sum
    assert kvjax.cache_bytes(state) == sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache.memory))
