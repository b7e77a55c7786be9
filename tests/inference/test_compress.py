"""A cache that is compressed later: to another budget, or by another policy than it was read under."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvjax
from kvjax.inference.state import slot_limits
from kvjax.methods.kvzip import REPEAT, REPEAT_LATER, Reconstruction
from tests.cases import core, slow
from tests.held import kept
from tests.small_models import GQA, LEARNED, LOCAL, random_model

MODEL = random_model(GQA)
TEXTS = [np.random.default_rng(row).integers(0, GQA.vocab_size, length).tolist() for row, length in enumerate((41, 20))]
BUDGET, STEPS = 12, 16


def read(policy: kvjax.Policy | str, budget: int | float = 1.0, **settings: Any) -> kvjax.State:
    return kvjax.prefill(MODEL, policy, TEXTS, budget, max_new_tokens=STEPS, **settings)[0]


def follow(state: kvjax.State, steps: int = 4) -> np.ndarray:
    logits = []
    for token in range(1, 1 + steps):
        state, found = kvjax.decode_step(state, [token, token + 9])
        logits.append(found)
    return np.stack(logits)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        core("keydiff", {"block": None}),
        ("l2", {"recent": 3, "sinks": 1}),
        ("cur", {}),
        ("l2", {"plan": "adakv"}),
        ("l2", {"codec": "int8"}),
        ("random", {"residual": "less", "residual.kernels": "performer"}),
        ("l2", {"residual": "momentkv", "recent": 3}),
        slow("streaming", {"positions": "original"}),
        slow("window", {"plan": "pyramid"}),
    ],
)
def test_a_full_cache_becomes_that_of_another_policy(name: str, settings: dict[str, Any]) -> None:
    policy = kvjax.policy(name, **settings)
    pressed, expected = kvjax.compress(read("full"), policy, BUDGET), read(policy, BUDGET)
    assert kvjax.cache_bytes(pressed) == kvjax.cache_bytes(expected)
    assert [kept(pressed, row) for row in range(2)] == [kept(expected, row) for row in range(2)]
    np.testing.assert_allclose(follow(pressed), follow(expected), rtol=1e-4, atol=1e-5)


def test_cache_positions_rank_by_the_same_keys() -> None:
    found = [read(kvjax.policy("keydiff", block=None, positions=positions), 24) for positions in ("cache", "original")]
    assert found[0].policy.codec.ordered
    cached, original = (kvjax.compress(state, None, BUDGET) for state in found)
    assert [kept(cached, row) for row in range(2)] == [kept(original, row) for row in range(2)]


@pytest.mark.parametrize("name", ["l2", "keydiff"])
def test_a_full_cache_of_cache_positions_becomes_that_of_another_policy(name: str) -> None:
    whole, policy = read(kvjax.policy("full", positions="cache", special=(7,))), kvjax.policy(name)
    assert whole.policy.codec.ordered
    pressed, expected = kvjax.compress(whole, policy, 60), read(policy, 60)
    np.testing.assert_allclose(follow(pressed), follow(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "settings", [core({}), {"codec": "int8"}, {"plan": "adakv"}, {"residual": "less", "residual.kernels": "performer"}]
)
def test_a_smaller_budget_keeps_what_ranks_highest_and_a_larger_one_makes_room(settings: dict[str, Any]) -> None:
    policy = kvjax.policy("h2o", recent=4, **settings)
    state = read(policy, 24)
    smaller = kvjax.compress(state, None, BUDGET)
    assert kvjax.cache_bytes(smaller) < kvjax.cache_bytes(state)
    for row in range(2):
        for before, after in zip(kept(state, row), kept(smaller, row), strict=True):
            assert sum(map(len, after)) == BUDGET * len(after)
            assert all(set(head) <= set(held) for held, head in zip(before, after, strict=True))
            assert all(set(held[-4:]) <= set(head) for held, head in zip(before, after, strict=True))
    larger = kvjax.compress(smaller, None, 20)
    assert kept(larger, 0) == kept(smaller, 0)
    assert np.isfinite(follow(larger, 8)).all()
    for token in range(1, 9):
        larger, _ = kvjax.decode_step(larger, [token, token])
    assert [sum(map(len, layer)) for layer in kept(larger, 0)] == [20 * GQA.kv_heads] * GQA.layers
    assert kept(state, 0) == kept(read(policy, 24), 0)  # the given state stays valid


def test_the_scores_of_a_state_decide() -> None:
    state = read("h2o", 24)
    view = state.cache.slots[0]
    scores, positions = view.slots.score[0, 0], view.position[0, 0]
    held = sorted((int(at) for at in positions if at >= 0), reverse=True)
    recent, rest = held[: BUDGET // 2], held[BUDGET // 2 :]
    number = {int(at): float(score) for at, score in zip(positions, scores, strict=True)}
    best = sorted(rest, key=lambda at: -number[at])[: BUDGET - len(recent)]
    assert kept(kvjax.compress(state, None, BUDGET), 0)[0][0] == sorted(recent + best)


def test_the_same_budget_changes_nothing() -> None:
    state = read("h2o", BUDGET)
    again = kvjax.compress(state, None, BUDGET)
    assert [kept(again, row) for row in range(2)] == [kept(state, row) for row in range(2)]
    np.testing.assert_allclose(follow(again), follow(state), rtol=1e-5, atol=1e-6)


def test_a_row_is_compressed_as_it_is_alone() -> None:
    state, _ = kvjax.extend(read("l2"), [list(range(3, 33)), []])  # beyond the planned length of one row only
    both = kvjax.compress(state, None, 0.5)
    for row in range(2):
        alone = kvjax.compress(kvjax.take_rows(state, [row]), None, 0.5)
        assert kept(alone, 0) == kept(both, row)
        for mine, theirs in zip(slot_limits(alone), slot_limits(both), strict=True):
            np.testing.assert_array_equal(mine[0], theirs[row])
    assert [limit[:, 0].tolist() for limit in slot_limits(both)] == [[35, 18]] * GQA.layers


@pytest.mark.parametrize("plan", [None, "adakv"])
def test_a_layer_gets_its_window_for_a_text_that_has_outgrown_its_plan(plan: str | None) -> None:
    state, _ = kvjax.prefill(random_model(LOCAL), "h2o", [TEXTS[0][:5]], 6, max_new_tokens=4)
    state, _ = kvjax.extend(state, [TEXTS[0][5:]])
    pressed = kvjax.compress(state, None, 6, plan=plan)
    assert slot_limits(state)[0].tolist() == [[12, 12]] and slot_limits(pressed)[0].tolist() == [[12, 12]]
    for token in range(1, 13):
        pressed, _ = kvjax.decode_step(pressed, [token])
    assert [len(head) for head in kept(pressed, 0)[0]] == [12, 12]
    assert sum(len(head) for head in kept(pressed, 0)[1]) == 12


@pytest.mark.parametrize(("before", "after"), [("uniform", "adakv"), ("adakv", "uniform")])
def test_a_plan_that_needs_another_form_of_the_keys_is_refused(before: str, after: str) -> None:
    state = read(kvjax.policy("streaming", plan=before), BUDGET)
    with pytest.raises(ValueError, match=f"plan='{after}' needs another form of the keys under streaming"):
        kvjax.compress(state, None, BUDGET, plan=after)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("h2o", "h2o ranks by attention of the text, which a cache does not hold; read the text with kvjax.prefill"),
        ("full", "full takes no budget to compress a cache to; choose a policy that does"),
        ("fastgen", "fastgen takes no budget"),
        (kvjax.policy("l2", special=(7,)), "l2 needs token ids of the text, which a cache does not hold"),
    ],
)
def test_what_a_cache_cannot_tell_is_refused(policy: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvjax.compress(read("full"), policy, BUDGET)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("streaming", "positions='cache' does not go with model 'random', which adds learned positions"),
        ("triattention", "RoPE"),
    ],
)
def test_a_policy_that_does_not_fit_the_model_is_refused(policy: str, message: str) -> None:
    whole, _ = kvjax.prefill(random_model(LEARNED), "full", TEXTS, max_new_tokens=STEPS)
    with pytest.raises(ValueError, match=message):
        kvjax.compress(whole, policy, BUDGET)


REQUESTS = {"prompt": REPEAT, "later": REPEAT_LATER}
KVZIP = kvjax.policy("kvzip", prompt=(3, 5), chunk=16, later=(7,), overlap=3, recent=4)


@pytest.mark.parametrize("policy", [KVZIP, kvjax.policy(KVZIP, plan="uniform")])
def test_a_text_is_read_again_over_a_full_cache(policy: kvjax.Policy) -> None:
    pressed, expected = kvjax.compress(read("full"), policy, BUDGET, text=TEXTS), read(policy, BUDGET)
    assert [kept(pressed, row) for row in range(2)] == [kept(expected, row) for row in range(2)]
    np.testing.assert_allclose(follow(pressed), follow(expected), rtol=1e-4, atol=1e-5)


def test_requests_are_read_by_the_tokenizer_of_the_states_model() -> None:
    tiny, text = kvjax.load("tiny"), [list(range(5, 61))]
    ids: dict[str, Any] = {
        name: tuple(tiny.tokenizer.encode(asked, add_special_tokens=False)) for name, asked in REQUESTS.items()
    }
    whole, _ = kvjax.prefill(kvjax.load("tiny"), "full", text, max_new_tokens=4)
    pressed, expected = (
        kvjax.compress(whole, policy, 40, text=text) for policy in ("kvzip", kvjax.policy("kvzip", **ids))
    )
    for positions, wanted in zip(kvjax.held_positions(pressed), kvjax.held_positions(expected), strict=True):
        np.testing.assert_array_equal(positions, wanted)
    stepped, _ = kvjax.decode_step(pressed, [7])
    kvjax.compress(stepped, None, 36)


def test_a_states_model_keeps_a_tokenizer_of_ones_own() -> None:
    model = random_model(GQA)
    model.tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [len(text) % 64])
    whole, _ = kvjax.prefill(model, "full", TEXTS, max_new_tokens=STEPS)
    pressed = kvjax.compress(whole, kvjax.policy("kvzip", recent=4), BUDGET, text=TEXTS)
    score = pressed.policy.score
    assert isinstance(score, Reconstruction) and score.prompt == (len(REPEAT),)


def test_a_text_of_ones_choice_ranks_what_is_left() -> None:
    state = read(KVZIP, 24)
    alike, other = (kvjax.compress(state, None, BUDGET, text=text) for text in (None, [[1, 2, 3] * 9, []]))
    assert kept(alike, 1) == kept(other, 1) and kept(alike, 0) != kept(other, 0)
    assert sum(len(head) for layer in kept(other, 0) for head in layer) == BUDGET * GQA.kv_heads * GQA.layers


@pytest.mark.parametrize(
    ("policy", "text", "message"),
    [
        (KVZIP, None, r"kvzip reads the text again; give its token ids, text=\[\[...\], ...\]"),
        (KVZIP, TEXTS[:1], "text has 1 rows, the state 2"),
        (KVZIP, [[GQA.vocab_size], [1]], "is not in the vocabulary"),
        (kvjax.policy("kvzip", prompt=[3], later=[64]), TEXTS, "token 64 is not in the vocabulary of 64"),
        ("l2", TEXTS, "l2 does not read a text again; leave text out"),
        ("kvzip", TEXTS, "kvzip needs the token ids of 'Repeat the previous context exactly.' here"),
        (kvjax.policy("kvzip", prompt=[3]), TEXTS, r"exactly, starting with' here, .*; give later=\[...\]"),
    ],
)
def test_a_text_that_does_not_fit_is_refused(policy: Any, text: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvjax.compress(read("full"), policy, BUDGET, text=text)


def test_heads_with_tokens_of_their_own_keep_their_policy() -> None:
    with pytest.raises(ValueError, match="heads of layer 0 hold different tokens, which a policy other than"):
        kvjax.compress(read("h2o", BUDGET), "keydiff", 8)


def test_a_ranking_by_the_next_token_is_refused() -> None:
    state = read(kvjax.policy("lsh_e", recent=4, sinks=1), 24)
    with pytest.raises(ValueError, match="lsh_e ranks slots by the token that needs one"):
        kvjax.compress(state, None, BUDGET)
