"""Attention Matching: against its definition in NumPy, on a cache that is there, and where it does not apply."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jaxtyping import Array, Float

import kvjax
from kvjax import generate
from kvjax.cli import options
from kvjax.inference.replay import replayed_queries
from kvjax.methods.attention_matching import Matching
from kvjax.types import LayerTokens, PyTree, View
from tests.cases import PAIRS, slow
from tests.held import kept, layers
from tests.methods.test_oracles import SHAPES, compare_with_oracle
from tests.oracles.attention_matching import factors_of, mean_square, ridge_regression
from tests.small_models import GQA, LOCAL, SINKS, SLOPED, random_model

RNG = np.random.default_rng(6)
TEXTS = [RNG.integers(0, GQA.vocab_size, length).tolist() for length in (41, 20)]
REPLAYS = [RNG.integers(0, GQA.vocab_size, length).tolist() for length in (9, 30)]
BUDGET = 12


def double(config: Any = GQA) -> kvjax.Model:
    return random_model(config, seed=1, dtype=jnp.float64)


def read(model: kvjax.Model, policy: kvjax.Policy | str, budget: int | float = 1.0, **settings: Any) -> kvjax.State:
    return kvjax.prefill(model, policy, TEXTS, budget, max_new_tokens=16, **settings)[0]


def matching(name: str = "l2", **settings: Any) -> kvjax.Policy:
    settings = ({"recent": 3} if name == "l2" else {}) | settings
    return kvjax.policy(name, residual="attention_matching", **settings)


@pytest.mark.parametrize("shape", ["mha", "mqa", slow("learned")])
def test_equals_its_definition_in_other_shapes(shape: str, x64: None) -> None:
    config, lengths = SHAPES[shape]
    compare_with_oracle(PAIRS["attention_matching+h2o"], double(config), lengths, 20)


def test_goes_beside_learned_sinks(x64: None) -> None:
    compare_with_oracle(PAIRS["attention_matching+h2o"], double(SINKS), (41, 9), 20)


@struct.dataclass
class Asking(kvjax.Score):
    """Remembers the query of each token."""

    def init_slot(self, new: LayerTokens, state: PyTree) -> Float[Array, "b h t g d"]:
        return jnp.moveaxis(new.q, 3, 2)

    def score(self, view: View, new: LayerTokens) -> kvjax.OldestFirst:
        return kvjax.OldestFirst()


def asked(model: kvjax.Model) -> list[list[np.ndarray]]:
    """Queries [h n g d] of each layer and row in a text followed by its replay, under a full cache."""
    whole = [text + replay for text, replay in zip(TEXTS, REPLAYS, strict=True)]
    state, _ = kvjax.prefill(model, kvjax.Policy(Asking()), whole, 1.0, max_new_tokens=1)
    found = []
    for view in layers(state):
        queries, position = np.asarray(view.slots.score), np.asarray(view.position)
        found.append([])
        for row, text in enumerate(whole):
            order = np.argsort(np.where(position[row, 0] < 0, 10**6, position[row, 0]))[: len(text)]
            found[-1].append(queries[row][:, order])
    return found


def test_a_replay_asks_what_the_text_after_the_cache_would(x64: None) -> None:
    model = double()
    state = read(model, "full")
    padded = np.zeros((2, 32), np.int32)
    for row, replay in enumerate(REPLAYS):
        padded[row, : len(replay)] = replay
    decoder, texts = state.decoder, (jnp.asarray(padded), jnp.asarray([9, 30]))
    found = replayed_queries(decoder, state.cache.replace(key=None), *texts)
    for layer, rows in zip(found, asked(model), strict=True):
        for row, (text, replay) in enumerate(zip(TEXTS, REPLAYS, strict=True)):
            expected = np.moveaxis(rows[row][:, len(text) :], 1, 2)
            np.testing.assert_allclose(layer[row, :, :, : len(replay)], expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("plan", [None, "adakv"])
def test_matches_the_queries_of_a_replay(plan: str | None, x64: None) -> None:
    """Keys, values and queries of the first layer are known, however the cache is compressed."""
    model = double()
    whole, policy = read(model, "full"), matching(**{"residual.queries": 8, "residual.ridge": 0.03})
    pressed = kvjax.compress(whole, policy, BUDGET, plan=plan, text=REPLAYS)
    plain = kvjax.compress(whole, kvjax.policy("l2", recent=3), BUDGET, plan=plan)
    before, after, queries = layers(whole)[0], pressed.cache.slots[0], asked(model)[0]
    for row, (text, replay) in enumerate(zip(TEXTS, REPLAYS, strict=True)):
        assert kept(pressed, row) == kept(plain, row)
        at = [len(text) + (2 * i + 1) * len(replay) // 16 for i in range(8)]
        for head in range(GQA.kv_heads):
            q = np.moveaxis(queries[row][head, at], 1, 0).reshape(-1, GQA.head_width)
            live = np.asarray(before.position[row, head]) >= 0
            k, v = (np.asarray(x)[row, head][live] for x in (before.kv.k, before.kv.v))
            staying = np.isin(np.asarray(before.position[row, head])[live], kept(pressed, row)[0][head])
            numbers = np.exp(q @ k.T / math.sqrt(GQA.head_width))
            numbers /= numbers.max(1, keepdims=True)
            weight = 0.03 * mean_square(numbers[:, staying])
            factors = factors_of(numbers[:, staying], numbers.sum(1), weight, 3)
            weights = numbers[:, staying] * factors
            weights /= weights.sum(1, keepdims=True)
            missing = numbers @ v / numbers.sum(1, keepdims=True) - weights @ v[staying]
            values = v[staying] + ridge_regression(weights, missing, 0.03 * mean_square(weights))
            position = np.asarray(after.position[row, head])
            order = np.argsort(np.where(position < 0, 10**6, position))[: staying.sum()]
            # By position on both sides: the full cache lies in the order of the text.
            rank = np.argsort(np.asarray(before.position[row, head])[live][staying])
            for ours, theirs in ((after.slots.residual, np.log(factors)), (after.kv.v, values)):
                np.testing.assert_allclose(np.asarray(ours)[row, head][order], theirs[rank], rtol=1e-6, atol=1e-9)


def test_a_matched_cache_may_be_compressed_again_and_goes_on() -> None:
    model = random_model(GQA)
    state = kvjax.compress(read(model, matching("h2o"), 24), None, BUDGET, text=REPLAYS)
    assert [len(head) for head in kept(state, 0)[0]] == [BUDGET] * GQA.kv_heads
    bias = np.asarray(layers(state)[0].slots.residual)
    assert np.abs(bias).max() > 0.1 and np.isfinite(bias).all()
    for token in range(1, 5):
        state, logits = kvjax.decode_step(state, [token, token])
        assert np.isfinite(logits).all()
    view = layers(state)[0]
    new = np.asarray(view.position) >= np.array([len(text) for text in TEXTS])[:, None, None]
    assert new.any() and not np.asarray(view.slots.residual)[new].any()  # what is written has no bias


def test_is_the_base_while_nothing_has_left_and_counts_its_bytes() -> None:
    model = random_model(GQA)
    (plain, expected), (state, logits) = (
        kvjax.prefill(model, kvjax.policy("h2o", residual=residual), TEXTS, 48, max_new_tokens=4)
        for residual in (None, "attention_matching")
    )
    np.testing.assert_array_equal(logits, expected)
    (_, logits), (_, expected) = (kvjax.decode_step(each, [5, 6]) for each in (state, plain))
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)
    slots = sum(view.position.size for view in layers(state))
    assert kvjax.cache_bytes(state) == kvjax.cache_bytes(plain) + 4 * slots


def test_layers_with_a_window_keep_their_slots() -> None:
    state = read(random_model(LOCAL), matching("h2o"), BUDGET)
    assert [bool(np.asarray(view.slots.residual).any()) for view in layers(state)] == [False, True]


def test_is_written_like_less() -> None:
    words = ["--policy", "h2o+attention_matching[residual.queries=64]"]
    made = options.policy_and_budget(generate.parser().parse_args(words))[0]
    assert made == kvjax.policy("h2o", residual=Matching(queries=64))
    for name, value in (("queries", 0), ("ridge", 0.0)):
        with pytest.raises(ValueError, match=f"{name}={value}"):
            matching("h2o", **{f"residual.{name}": value})


def test_what_cannot_be_matched_is_one_sentence() -> None:
    model = random_model(GQA)
    state = read(model, "full")
    with pytest.raises(ValueError, match=r"which a cache does not hold; give kvjax\.compress a text"):
        kvjax.compress(state, matching(), BUDGET)
    with pytest.raises(ValueError, match="text has 1 rows, the state 2; give a text for each row"):
        kvjax.compress(state, matching(), BUDGET, text=[[1, 2, 3]])
    for policy, name in ((matching("h2o"), "attention_matching"), (kvjax.policy("omp", recent=2), "omp")):
        with pytest.raises(
            ValueError, match=rf"{name} matches queries at all distances, .* \(ALiBi\); use another policy"
        ):
            read(random_model(SLOPED), policy, BUDGET)
