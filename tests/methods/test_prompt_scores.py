"""Scores of prompts beyond what the tables of policies already test: sharp keys, later turns, tokens that stay."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import kvjax
from kvjax.methods.attention_matching import chosen_first
from kvjax.models.attention import Attention
from tests.small_models import GQA, random_model, with_attention

MODEL = random_model(GQA)
TINY = kvjax.load("tiny")
TEXT = np.random.default_rng(0).integers(0, 64, (1, 400))


def held(state: kvjax.State, layer: int = 0) -> list[set[int]]:
    return [set(head[head >= 0].tolist()) for head in state.cache.positions()[layer][0]]


def with_larger_keys(factor: float) -> kvjax.Model:
    """The same function, with keys that are so many times larger and queries that are smaller."""

    def change(mixer: Attention) -> dict[str, Array]:
        return {"key": mixer.key.weight * factor, "query": mixer.query.weight / factor}

    return kvjax.Model(with_attention(MODEL.weights, change), GQA)


@pytest.mark.parametrize("name", ["leverage", "compactor"])
def test_large_keys_of_more_directions_than_channels_rank(name: str) -> None:
    policy = kvjax.policy(name, recent=4)
    small, large = (
        kvjax.prefill(model, policy, TEXT, 40, max_new_tokens=1)[0] for model in (MODEL, with_larger_keys(1e3))
    )
    for ours, theirs in zip(held(small), held(large), strict=True):
        assert len(theirs) == 40 and len(ours & theirs) > 20


@pytest.mark.parametrize("name", ["triattention", "fastgen"])
def test_after_a_turn_generated_text_still_leaves_before_given_text(name: str) -> None:
    settings: dict[str, Any] = {
        "triattention": {"evict_every": 1},
        # Every token is punctuation; 30 * 0.3 slots are for generated ones.
        "fastgen": {"punctuation": tuple(range(TINY.config.vocab_size)), "local": 0.0, "order": ("punctuation",)}
        | {"spare_punctuation": 0.3, "threshold": 0.01},
    }
    budget = 40 if name == "triattention" else 1.0
    tokens = TEXT[:, :60]
    state, _ = kvjax.prefill(TINY, kvjax.policy(name, **settings[name]), tokens[:, :30], budget, max_new_tokens=30)
    for step in range(30, 39):
        state, _ = kvjax.decode_step(state, tokens[:, step])
    state, _ = kvjax.extend(state, tokens[:, 39:40])
    for step in range(40, 54):
        state, _ = kvjax.decode_step(state, tokens[:, step])
    given = {*range(30), 39}
    for layer in range(TINY.config.layers):
        for head in held(state, layer):
            assert given <= head
            assert len(head - given) < 23 and 53 in head


@pytest.mark.parametrize("delimiters", [(20, 29), (29,), (3, 20), ()])
def test_a_question_has_tokens_after_its_delimiter(delimiters: tuple[int, ...]) -> None:
    texts = TEXT[:, :60].reshape(2, 30) % 34
    for place in delimiters:
        texts[0, place] = texts[1, place - 5] = 34
    found = []
    for delimiter in (34, None):
        policy = kvjax.policy("finch", delimiter=delimiter, recent=9)
        state, _ = kvjax.prefill(MODEL, policy, texts, 16, lengths=[30, 25], max_new_tokens=40)
        turn, _ = kvjax.extend(state, texts, lengths=[30, 25])
        found.append([np.sort(positions) for each in (state, turn) for positions in kvjax.held_positions(each)])
    for ours, last in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, last)


def test_pursuit_counts_slots_that_stand_for_evicted_ones() -> None:
    settings = {"residual": "attention_matching", "residual.bound": 7.0}
    policy = kvjax.policy("omp", recent=2, each=1, **settings)
    state, _ = kvjax.prefill(MODEL, policy, TEXT[:, :120], 24, max_new_tokens=1)
    unbiased = [view.replace(slots=view.slots.replace(residual=view.slots.residual * 0)) for view in state.cache.slots]
    plain = state.replace(cache=state.cache.replace(layers=tuple(unbiased)))
    ours, without = (kvjax.extend(each, TEXT[:, 120:180])[0] for each in (state, plain))
    firsts = [sum(len({p for p in head if p < 120}) for head in held(each)) for each in (ours, without)]
    assert firsts[0] > firsts[1]


@pytest.mark.parametrize("each", [1, 3, 7])
def test_pursuit_chooses_every_key_once(each: int) -> None:
    shares = jnp.asarray(np.random.default_rng(1).random((1, 1, 12, 10)))
    found = np.asarray(chosen_first(shares, -(-10 // each), each, 1e-2))[0, 0]
    assert len(set(found.tolist())) == 10 and found.max() == 1.0
    first = np.asarray(chosen_first(shares, 1, each, 1e-2))[0, 0]
    assert set(np.argsort(-found)[:each]) == set(np.flatnonzero(first))


@pytest.mark.parametrize(("count", "second"), [(200, "other"), (3000, "same")])
def test_one_key_of_a_pursuit_stands_for_at_most_e_to_the_7_others(count: int, second: str) -> None:
    """Equal keys explain one query, and another key a second one: it is next once the first has a factor of `count`."""
    shares = np.zeros((1, 1, 2, count + 1))
    shares[..., 0, :count], shares[..., 1, count] = 1.0, 10.0
    first, next_best = np.argsort(-np.asarray(chosen_first(jnp.asarray(shares), 2, 1, 1e-6))[0, 0])[:2]
    assert first < count
    assert (next_best == count) == (second == "other")


def test_critical_tokens_of_a_score_of_prompts_leave_generated_ones_in_their_order() -> None:
    policy = kvjax.policy("criticalkv", base="leverage", recent=4)
    state, _ = kvjax.prefill(MODEL, policy, TEXT[:, :30], 40, max_new_tokens=24)
    for step in range(30, 54):
        state, _ = kvjax.decode_step(state, TEXT[:, step])
    for head in held(state):
        generated = sorted(position for position in head if position >= 30)
        assert generated == list(range(54 - len(generated), 54))
