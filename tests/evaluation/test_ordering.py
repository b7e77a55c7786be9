"""Scores of policies beside the attention that tokens get."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.evaluation.replay import compare, ordering
from kvjax.model import Model
from kvjax.rope import rotate
from kvjax.training.less.record import read_full
from kvjax.types import TokenBatch
from tests.small_models import GQA, sharp_model

# No token twice: equal tokens have equal norms in the first layer, whose order rounding would decide.
TOKENS = np.stack([np.random.default_rng(seed).permutation(GQA.vocab_size)[:20] for seed in (5, 6)])


@pytest.fixture(scope="module")
def model() -> Model:
    return sharp_model(GQA, jnp.float32)


@given(st.integers(2, 12), st.integers(0, 10**6))
@settings(deadline=None, max_examples=50)
def test_dropping_by_attention_itself_loses_the_least(n: int, seed: int) -> None:
    attention, scores = np.random.default_rng(seed).random((2, 3, n))
    ideal = compare(attention, attention)
    np.testing.assert_allclose(ideal.loss_ratio, 0.0, atol=1e-12)
    np.testing.assert_allclose(ideal.correlation, 1.0)
    assert (compare(scores, attention).loss_ratio >= -1e-12).all()
    worst = compare(-attention, attention)
    assert (worst.loss_ratio >= compare(scores, attention).loss_ratio - 1e-12).all()
    np.testing.assert_allclose(worst.correlation, -1.0)


def test_by_hand() -> None:
    """Dropping 0.5, 0.2, 0.3 in this order loses 0.5, 0.7, 1.0 against 0.2, 0.5, 1.0."""
    found = compare(np.array([1.0, 2.0, 3.0]), np.array([0.5, 0.2, 0.3]))
    assert found.loss_ratio == pytest.approx((0.3 + 0.2 + 0.0) / 3)
    assert np.isnan(compare(np.ones(3), np.array([0.5, 0.2, 0.3])).correlation)


@pytest.mark.parametrize("name", ["h2o", "l2"])
def test_scores_are_means_over_the_queries_that_see_a_token(name: str, model: Model) -> None:
    """H2O's are sums of attention so far, L2's the keys' norms: both from the model's own attention, in NumPy."""
    found = ordering(model, name, TOKENS)
    queries, keys = _queries_and_keys(model)
    for layer, (q, k) in enumerate(zip(queries, keys, strict=True)):
        logits = np.einsum("bhgtd,bhsd->bhgts", q, k) / np.sqrt(GQA.head_width)
        logits = np.where(np.tri(TOKENS.shape[1], dtype=bool), logits, -np.inf)
        probs = np.exp(logits - logits.max(-1, keepdims=True))
        probs = (probs / probs.sum(-1, keepdims=True)).mean(2)
        seen = np.arange(TOKENS.shape[1], 0, -1)
        so_far = np.cumsum(probs, axis=2).sum(2) / seen
        scores = so_far if name == "h2o" else -np.linalg.norm(k, axis=-1)
        wanted = compare(scores, probs.mean(2))
        np.testing.assert_allclose(found.loss_ratio[:, layer], wanted.loss_ratio, atol=2e-3)
        np.testing.assert_allclose(found.correlation[:, layer], wanted.correlation, atol=2e-3)


def _queries_and_keys(model: Model) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Rotated, of the plain model."""

    place, zeros = jnp.arange(20), jnp.zeros(2, jnp.int32)
    of_rows: dict[str, Any] = dict(prompt_length=zeros, read=zeros + 20, horizon=zeros, end=zeros + 20, seed=zeros)
    reading = TokenBatch(jnp.asarray(TOKENS), jnp.broadcast_to(place, TOKENS.shape), **of_rows)
    reads, _ = read_full(model.weights, model.config, reading)
    rope = model.config.layer_configs[0].rope
    return [np.asarray(rotate(rope, read.q, place, 20)) for read in reads], [
        np.asarray(rotate(rope, read.k, place, 20)) for read in reads
    ]


def test_refuses_scores_of_all_layers_together(model: Model) -> None:
    with pytest.raises(ValueError, match="all layers together"):
        ordering(model, kvjax.policy("keyformer", shared=True), TOKENS)


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "streaming"])
def test_scores_that_ask_nothing_of_a_written_token_stay_as_they_are(name: str, model: Model) -> None:
    policy = kvjax.policy(name, recent=4)
    found = ordering(model, policy, TOKENS)
    assert found.loss_ratio.shape == (len(TOKENS), GQA.layers, GQA.kv_heads)
    assert np.isfinite(found.loss_ratio).all()
