"""Products with weights of 8-bit integers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models.matmul import product_with_codes

RANDOM = np.random.default_rng(0)
CODES = jnp.asarray(RANDOM.integers(-127, 128, (24, 96), np.int8))
SCALE = jnp.asarray(RANDOM.random(24, np.float32))
WHOLE = np.asarray(CODES) * np.asarray(SCALE)[:, None].astype(np.float64)


def inputs(rows: int) -> np.ndarray:
    return RANDOM.normal(size=(rows, 96)) * 10.0 ** RANDOM.integers(-3, 4, (rows, 1))  # rows of unequal size


@pytest.mark.parametrize(("rows", "copies"), [(1, 1), (5, 1), (17, 1), (65, 1), (3, 343)])
def test_products_with_codes_are_products_with_their_weight(rows: int, copies: int) -> None:
    x, turns = inputs(rows).astype(np.float32), np.arange(copies) % 24
    codes, scale = (jnp.concatenate([jnp.roll(whole, turn, 0) for turn in turns]) for whole in (CODES, SCALE))
    found = product_with_codes(jnp.asarray(x), codes, scale, jnp.float32)
    assert found.dtype == jnp.float32
    wanted = x @ np.concatenate([np.roll(WHOLE, turn, 0) for turn in turns]).T
    error = np.abs(np.asarray(found) - wanted).max(1) / np.abs(wanted).max(1)
    assert (error < 1e-4).all()


def test_products_of_float64_are_exact(x64: None) -> None:
    x = inputs(3)
    found = product_with_codes(jnp.asarray(x), CODES, SCALE, jnp.float64)
    np.testing.assert_allclose(found, x @ WHOLE.T, rtol=1e-12, atol=1e-12 * np.abs(x).max())


def test_leading_axes_and_stacked_codes() -> None:
    x, codes = jnp.asarray(inputs(6), jnp.float32).reshape(2, 3, 96), jnp.stack([CODES, CODES[::-1]])
    alone = [product_with_codes(rows, each, SCALE, jnp.float32) for rows, each in zip(x, codes, strict=True)]
    mapped = jax.vmap(product_with_codes, in_axes=(0, 0, None, None))(x, codes, SCALE, jnp.float32)
    np.testing.assert_allclose(mapped, np.stack(alone), rtol=1e-5)
    np.testing.assert_allclose(product_with_codes(x, CODES, SCALE, jnp.float32)[0], alone[0], rtol=1e-5)


def test_derivatives_are_those_of_the_exact_product() -> None:
    x, weights = inputs(2).astype(np.float32), RANDOM.normal(size=(2, 24)).astype(np.float32)
    found = jax.grad(lambda x: (weights * product_with_codes(x, CODES, SCALE, jnp.float32)).sum())(jnp.asarray(x))
    np.testing.assert_allclose(found, weights @ WHOLE, rtol=1e-3, atol=1e-3)


def test_a_tied_table_is_held_once() -> None:
    rounded, plain = kvjax.load("tiny", weights="int8").weights, kvjax.load("tiny").weights
    assert plain.unembedding is None and rounded.unembedding is not None and rounded.unembedding.scale is not None
    assert rounded.embedding is None and rounded.unembedding.weight.dtype == np.int8
    error = np.abs(np.asarray(rounded.unembedding.matrix) - np.asarray(plain.embedding))
    assert (error <= 0.51 * rounded.unembedding.scale[:, None]).all()
    ids = jnp.array([[3, 2047]])
    np.testing.assert_array_equal(rounded.table.rows(ids), rounded.unembedding.matrix[ids])
