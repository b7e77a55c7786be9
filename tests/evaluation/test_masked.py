"""Perplexity by masks beside perplexity by eviction."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.evaluation.perplexity import perplexity
from kvjax.evaluation.replay import masked_perplexity
from kvjax.model import Model
from tests.cases import slow
from tests.small_models import GQA, sharp_model

BUDGET = 9
TOKENS = np.random.default_rng(3).integers(1, GQA.vocab_size, (2, 26))


def policy(name: str) -> kvjax.Policy:
    settings: dict[str, Any] = {
        "less": {"kernels": "performer"},
        "lambda_mask": {"recent": 4},
        "lsh_e": {"sinks": 1, "recent": 3},
    }
    return kvjax.policy(name, **settings.get(name, {}))


@pytest.fixture(scope="module")
def model() -> Model:
    return sharp_model(GQA, jnp.float32)


@pytest.mark.parametrize(
    "name", [slow("tova"), slow("h2o"), slow("keyformer"), "less", slow("streaming"), slow("l2"), slow("lsh_e")]
)
def test_masks_of_decoding_are_decoding(name: str, model: Model) -> None:
    streamed = perplexity(model, policy(name), TOKENS, BUDGET)
    masked = masked_perplexity(model, policy(name), TOKENS, BUDGET, mask="decode")
    np.testing.assert_allclose(masked.nats, streamed.nats, atol=2e-4)
    assert masked[1:] == (streamed.cache_bytes, streamed.full_cache_bytes)


@pytest.mark.parametrize("name", ["lambda_mask", slow("random"), slow("lsh_e")])
def test_what_looks_at_no_attention_has_one_mask(name: str, model: Model) -> None:
    masked = masked_perplexity(model, policy(name), TOKENS, BUDGET)
    np.testing.assert_allclose(masked.nats, perplexity(model, policy(name), TOKENS, BUDGET).nats, atol=2e-4)


@pytest.mark.parametrize("name", ["h2o", slow("keyformer"), slow("less")])
def test_a_full_budget_masks_nothing(name: str, model: Model) -> None:
    plain = perplexity(model, "full", TOKENS).nats
    np.testing.assert_allclose(masked_perplexity(model, policy(name), TOKENS).nats, plain, atol=2e-4)


def test_the_full_softmax_shows_other_scores(model: Model) -> None:
    decode, full = (
        masked_perplexity(model, "h2o", TOKENS, BUDGET, mask=mask).nats for mask in ("decode", "full-softmax")
    )
    np.testing.assert_allclose(decode[:, : BUDGET - 1], full[:, : BUDGET - 1], atol=2e-4)
    assert np.abs(decode - full).max() > 1e-3


@pytest.mark.parametrize(
    ("made", "budget", "mask", "sentence"),
    [
        ("h2o", 9, "softmax", "mask='softmax' is not one of decode, full-softmax"),
        (kvjax.policy("keyformer", shared=True), 9, "decode", "layer by layer"),
        (kvjax.policy("h2o", selection="topk"), 9, "decode", "more than evicting one token per step"),
        ("streaming", 9, "full-softmax", "positions=original"),
        (kvjax.policy("h2o", plan="adakv"), 9, "decode", "prompt"),
    ],
    ids=["mask", "layers", "selection", "positions", "prompt"],
)
def test_refuses(made: Any, budget: int | float, mask: str, sentence: str, model: Model) -> None:
    with pytest.raises(ValueError, match=sentence):
        masked_perplexity(model, made, TOKENS, budget, mask=mask)
