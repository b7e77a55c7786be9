"""Products with weights of 8-bit integers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.methods.less.checkpoint import find, load, save
from kvjax.models.fingerprint import fingerprint, fingerprints
from kvjax.models.linear import code_dtype, integer_product, product_with_codes, signed, unsigned

RANDOM = np.random.default_rng(0)
SIGNED = jnp.asarray(RANDOM.integers(-127, 128, (24, 96), np.int8))
SCALE = jnp.asarray(RANDOM.random(24, np.float32))
WHOLE = np.asarray(SIGNED) * np.asarray(SCALE)[:, None].astype(np.float64)

of_both_kinds = pytest.mark.parametrize("codes", [SIGNED, unsigned(SIGNED)], ids=["signed", "unsigned"])


def inputs(rows: int) -> np.ndarray:
    return RANDOM.normal(size=(rows, 96)) * 10.0 ** RANDOM.integers(-3, 4, (rows, 1))  # rows of unequal size


def test_unsigned_codes_are_128_larger() -> None:
    every = jnp.arange(-128, 128, dtype=jnp.int8)
    np.testing.assert_array_equal(unsigned(every), np.arange(256))
    np.testing.assert_array_equal(signed(unsigned(every)), every)
    assert signed(SCALE) is SCALE


def test_only_cpus_have_unsigned_codes() -> None:
    assert code_dtype("cpu") in (np.int8, np.uint8)
    assert code_dtype("gpu") == code_dtype("tpu") == np.int8


@of_both_kinds
@pytest.mark.parametrize(("count", "copies"), [(1, 1), (2, 343), (8, 1), (9, 1), (32, 343), (130, 1)])
def test_integer_products_are_exact(count: int, copies: int, codes: jax.Array) -> None:
    rows, turns = RANDOM.integers(-128, 128, (count, 96), np.int8), np.arange(copies) % 24
    wide, whole = (np.concatenate([np.roll(each, turn, 0) for turn in turns]) for each in (codes, SIGNED))
    found = integer_product(jnp.asarray(rows), jnp.asarray(wide))
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, rows.astype(np.int64) @ whole.astype(np.int64).T)


@pytest.mark.parametrize("count", [2, 10, 32])
def test_products_with_few_rows_convert_no_codes(count: int) -> None:
    rows = jnp.zeros((count, 96), jnp.int8)
    program = jax.jit(integer_product).lower(rows, unsigned(SIGNED)).as_text()  # a step would convert all weights
    assert "xor" not in program


@of_both_kinds
@pytest.mark.parametrize("rows", [1, 5, 17, 65])
def test_products_with_codes_are_products_with_their_weight(rows: int, codes: jax.Array) -> None:
    x = inputs(rows).astype(np.float32)
    found = product_with_codes(jnp.asarray(x), codes, SCALE, jnp.float32)
    assert found.dtype == jnp.float32
    # Digits are off by at most 1.6e-5 of the row's largest input, one this way and the other that way.
    unit = np.abs(x).max(1, keepdims=True) * np.linalg.norm(WHOLE, axis=1)
    assert (np.abs(np.asarray(found) - x @ WHOLE.T) <= 5.5e-5 * unit).all()


@of_both_kinds
def test_products_of_float64_are_exact(codes: jax.Array, x64: None) -> None:
    x = inputs(3)
    found = product_with_codes(jnp.asarray(x), codes, SCALE, jnp.float64)
    np.testing.assert_allclose(found, x @ WHOLE.T, rtol=1e-12, atol=1e-12 * np.abs(x).max())


@of_both_kinds
@pytest.mark.parametrize("rows", [3, 20])
def test_leading_axes_and_stacked_codes(rows: int, codes: jax.Array) -> None:
    x, stacked = jnp.asarray(inputs(2 * rows), jnp.float32).reshape(2, rows, 96), jnp.stack([codes, codes[::-1]])
    alone = [product_with_codes(each, of_it, SCALE, jnp.float32) for each, of_it in zip(x, stacked, strict=True)]
    mapped = jax.vmap(product_with_codes, in_axes=(0, 0, None, None))(x, stacked, SCALE, jnp.float32)
    np.testing.assert_allclose(mapped, np.stack(alone), rtol=1e-5)
    shared = jax.vmap(product_with_codes, in_axes=(0, None, None, None))(x, codes, SCALE, jnp.float32)
    np.testing.assert_allclose(shared[0], alone[0], rtol=1e-5)
    together = product_with_codes(x, codes, SCALE, jnp.float32)
    np.testing.assert_allclose(together[0], alone[0], rtol=1e-5)


@of_both_kinds
def test_derivatives_are_those_of_the_exact_product(codes: jax.Array) -> None:
    x, weights = inputs(2).astype(np.float32), RANDOM.normal(size=(2, 24)).astype(np.float32)
    found = jax.grad(lambda x: (weights * product_with_codes(x, codes, SCALE, jnp.float32)).sum())(jnp.asarray(x))
    np.testing.assert_allclose(found, weights @ WHOLE, rtol=1e-3, atol=1e-3)


def test_what_was_made_for_a_model_is_its_own_in_8_bits(tmp_path: Path) -> None:
    owner, rounded = kvjax.load("tiny"), kvjax.load("tiny", weights="int8")
    assert len(rounded.generate("Once", policy="less", budget=16, max_new_tokens=4, temperature=0.0)[0]) > 4
    kvjax.prefill(rounded, kvjax.policy("triattention"), [[5, 17, 42]], 16)
    assert fingerprint(rounded) != fingerprint(owner) == fingerprints(rounded)[0]
    assert fingerprints(rounded)[1] == fingerprint(rounded)
    params, settings = load(find("h2o_10", "h2o")[0], owner, "h2o")
    # Older versions made kernels for the codes.
    save(tmp_path, params, dataclasses.replace(settings, fingerprint=fingerprint(rounded)))
    load(tmp_path, rounded, "h2o")
    with pytest.raises(ValueError, match="were made for model 'tiny'"):
        load(tmp_path, owner, "h2o")
    other = kvjax.Model(rounded.weights, dataclasses.replace(rounded.config, norm_eps=0.1))
    assert fingerprints(other) == (fingerprint(other),)


def test_a_tied_table_is_held_once() -> None:
    rounded, plain = kvjax.load("tiny", weights="int8").weights, kvjax.load("tiny").weights
    assert plain.unembedding is None and rounded.unembedding is not None and rounded.unembedding.scale is not None
    assert rounded.embedding is None and rounded.unembedding.weight.dtype == code_dtype("cpu")
    error = np.abs(np.asarray(rounded.unembedding.matrix) - np.asarray(plain.embedding))
    assert (error <= 0.51 * rounded.unembedding.scale[:, None]).all()
    ids = jnp.array([[3, 2047]])
    np.testing.assert_array_equal(rounded.table.rows(ids), rounded.unembedding.matrix[ids])
