"""What a policy would guess, read from the full cache's text, is what its drafts guess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cli import evaluate
from kvjax.evaluation.acceptance import Acceptance, acceptance, continuations
from kvjax.evaluation.texts import SAMPLE
from kvjax.generation.generate import generate_ids
from tests.small_models import GQA, random_model

PROMPTS = np.random.default_rng(3).integers(0, 64, (3, 40))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft_tokens", [2, 4])
def test_rounds_are_those_of_speculation(temperature: float, draft_tokens: int, x64: None) -> None:
    model, policy = random_model(GQA, dtype=jnp.float64), kvjax.policy("h2o", recent=4)
    texts = continuations(model, PROMPTS.tolist(), 41, temperature, seed=2)
    measured = acceptance(model, policy, PROMPTS, texts, 36, temperature=temperature, seed=2)
    assert 0.2 < measured.agrees.mean() < 1
    settings: dict[str, Any] = {"policy": policy, "budget": 36, "temperature": temperature, "seed": 2}
    settings |= {"max_new_tokens": 41, "lossless": True, "draft_tokens": draft_tokens, "stop_at_eos": False}
    drafted = generate_ids(model, PROMPTS.tolist(), **settings)
    assert drafted.tokens == texts.tolist()
    expected = [40 / rounds for rounds in drafted.rounds]
    np.testing.assert_allclose(measured.tokens_per_round(draft_tokens), expected)


def test_a_round_adds_right_guesses_and_one_token_more() -> None:
    agrees = np.array([[True] * 6, [False] * 6, [True, True, False, True, False, True]])
    assert Acceptance(agrees, 0, 0).tokens_per_round(2) == [6 / 2, 1, 6 / 3]


def test_the_command_measures_policies(tmp_path: Path) -> None:
    words = ["acceptance", "--model", "tiny", "--text", str(SAMPLE), "--rows", "1", "--lengths", "64"]
    words += ["--policies", "h2o", "--budgets", "16,128", "--new-tokens", "17", "--out", str(tmp_path)]
    assert evaluate.main(words) == 0
    full, small, large = map(json.loads, (tmp_path / "acceptance.jsonl").read_text().splitlines())
    assert full["acceptance"] == large["acceptance"] == 1
    assert (full["tokens_per_round_2"], full["tokens_per_round_8"]) == (16 / 6, 16 / 2)
    assert 1 <= small["tokens_per_round_4"] <= 4
    assert small["cache_bytes"] < full["cache_bytes"]
    assert evaluate.main([*words[:-2], "--refresh", "2", "--out", str(tmp_path / "refreshed")]) == 0
    rows = (tmp_path / "refreshed" / "acceptance.jsonl").read_text().splitlines()
    full, small, large = map(json.loads, rows)
    assert (full["acceptance"], large["acceptance"], large["tokens_per_round_2"]) == (1, 1, 16 / 6)
    assert 1 <= small["tokens_per_round_2"] <= 3 and small["refresh"] == 2
    assert evaluate.main([*words, "--new-tokens", "1"]) == 2
