"""More text on top of what a cache holds: against oracles, chunks of a prompt and the full forward pass."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.inference.state import slot_limits
from kvjax.methods.adakv import AdaKV
from kvjax.model import Model
from tests.cases import FIRST, PAIRS, POLICIES, Case, core, slow
from tests.held import kept
from tests.oracles.decoder import Decoder
from tests.small_models import GQA, random_model, small_config

engine = importlib.import_module("kvjax.inference.decoder")
CASES = POLICIES | PAIRS
LENGTHS = (41, 9)
TEXT = np.random.default_rng(4).integers(0, GQA.vocab_size, (2, 120))


@functools.cache
def model() -> Model:
    """In float64: called under `x64`."""
    return random_model(GQA, seed=1, dtype=jnp.float64)


def read(case: Case, lengths: tuple[int, ...] = LENGTHS, **changes: Any) -> tuple[kvjax.State, jax.Array]:
    """The beginnings of `TEXT`, each of its own length."""
    arguments = {"plan": case.plan, "prefill_chunk": case.prefill_chunk, "max_new_tokens": 60} | changes
    policy, budget = arguments.pop("policy", case.make()), arguments.pop("budget", case.budget)
    prompts = [TEXT[row, :length].tolist() for row, length in enumerate(lengths)]
    return kvjax.prefill(model(), policy, prompts, budget, key=jax.random.key(5), **arguments)


def write(state: kvjax.State, steps: int) -> tuple[kvjax.State, list[np.ndarray]]:
    """The next tokens of `TEXT`, one after another."""
    found = []
    for _ in range(steps):
        token = TEXT[np.arange(len(state.position)), np.asarray(state.position)]
        state, logits = kvjax.decode_step(state, jnp.asarray(token, jnp.int32))
        found.append(np.asarray(logits))
    return state, found


def turn(
    state: kvjax.State, counts: tuple[int, ...], logits: str = "all"
) -> tuple[kvjax.State, jax.Array, list[list[int]]]:
    """The next tokens of `TEXT`, so many of each row at once."""
    starts = np.asarray(state.position)
    texts = [TEXT[row, start : start + count].tolist() for row, (start, count) in enumerate(zip(starts, counts))]  # noqa: B905
    after, found = kvjax.extend(state, texts, logits=logits)
    return after, found, texts


def same(one: Any, other: Any) -> None:
    np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-9)


TURNS = [name for name in FIRST if POLICIES[name].policy not in ("fastgen", "topk_oracle", "baseline_plus", "full")]
TURNS += ["keyformer-fresh", "keyformer-shared", "snapkv-max", "h2o-cache-positions", "lightkv-context", "h2o+topk"]
TURNS += ["h2o+adakv", "less+snapkv+adakv", "streaming+adakv", "lightkv-running+adakv", "less+lightkv-context"]
TURNS += ["h2o+int8", "streaming+int8", "h2o+adakv+int8", "less+h2o+int4", "tova+int4", "fastgen", "fastgen-high"]
TURNS += ["streaming+fp8", "h2o+adakv+fp8", "momentkv+h2o", "momentkv+h2o+adakv"]
TURNS += ["attention_matching+h2o", "attention_matching+h2o+adakv", "attention_matching+h2o+int8"]


DEFAULT = ("lsh_e", "keyformer-fresh", "scissorhands", "snapkv-max", "less+lightkv-context", "h2o+adakv", "h2o+topk")
DEFAULT += ("streaming+fp8", "h2o+adakv+fp8", "momentkv+h2o", "attention_matching+h2o")
"""Turns that the default suite reads: one for each way to ask, to store, to remember and to shrink."""


@pytest.mark.parametrize(
    "name",
    [
        core(name) if name in ("h2o", "streaming") else name if name in DEFAULT or "int8" in name else slow(name)
        for name in TURNS
    ],
)
def test_turns_equal_the_oracle(name: str, x64: None) -> None:
    case = CASES[name]
    state, _ = read(case)
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), state.weights)
    decoders = [Decoder(weights, GQA, case.oracles(state, row, 120, evicts_first=True), horizon=60) for row in range(2)]
    for row, decoder in enumerate(decoders):
        decoder.prompt(TEXT[row, : LENGTHS[row]].tolist())
    # Text that is written, a turn, text again, a turn for one row only, and text: beyond a window of LightKV.
    for counts, steps in (((14, 16), 12), ((9, 0), 6)):
        state, found = write(state, steps)
        for logits in found:
            for row, decoder in enumerate(decoders):
                same(logits[row], decoder.step(int(TEXT[row, decoder.next])))
        state, logits, texts = turn(state, counts)
        for row, (decoder, text) in enumerate(zip(decoders, texts, strict=True)):
            if text:
                same(logits[row, : len(text)], decoder.turn(text))
            assert np.isnan(logits[row, len(text) :]).all()
            assert kept(state, row) == decoder.kept(), f"row {row} after a turn of {len(text)} tokens"
    state, found = write(state, 12)
    for logits in found:
        for row, decoder in enumerate(decoders):
            same(logits[row], decoder.step(int(TEXT[row, decoder.next])))
    for row, decoder in enumerate(decoders):
        assert kept(state, row) == decoder.kept()


STEPS = (*TURNS, "h2o-every-8", "h2o-every-8+adakv", "less+l2-every-8+adakv", "lightkv-sequential")


@pytest.mark.parametrize(
    "name",
    [core(name) if name == "h2o" else name if name in (*DEFAULT, "keyformer-shared") else slow(name) for name in STEPS],
)
def test_steps_together_equal_one_after_another(name: str, x64: None) -> None:
    state, _ = read(CASES[name])
    state = state.replace(active=jnp.asarray([True, False]))
    tokens = [TEXT[row, start : start + 13] for row, start in enumerate(np.asarray(state.position))]
    after, expected = write(state, 13)
    read_together = jax.jit(lambda decoder, cache, tokens: decoder.steps(cache, tokens))
    cache, found = read_together(state.decoder, state.cache, jnp.asarray(tokens, jnp.int32))
    same(found[0], np.stack(expected)[:, 0])
    jax.tree.map(same, cache.replace(key=None), after.cache.replace(key=None))
    assert cache.position.tolist() == [LENGTHS[0] + 13, LENGTHS[1]]


@pytest.mark.parametrize(
    "name",
    [
        *("h2o", "keyformer-shared", "h2o+int8"),
        *map(slow, ("streaming", "snapkv-max", "less-performer", "lsh_e-one-shot")),
    ],
)
def test_chunks_equal_turns(name: str, x64: None) -> None:
    case, lengths = CASES[name], (41, 30)
    whole, expected = read(case, lengths, prefill_chunk=16)
    state, logits = read(case, (16, 16), prefill_chunk=None)
    state, found, _ = turn(state, (16, 14))
    logits = jnp.stack([logits[0], found[1, 13]])
    state, last, _ = turn(state, (9, 0), logits="last")
    assert np.isnan(last[1]).all()
    same(jnp.stack([last[0], logits[1]]), expected)
    for _ in range(2):
        for row in range(2):
            assert kept(state, row) == kept(whole, row)
        (state, one), (whole, other) = write(state, 10), write(whole, 10)
        same(one, other)


@pytest.mark.parametrize(("policy", "settings", "first"), [("lsh_e", {"recent": 4}, 9), ("keydiff", {"block": 8}, 16)])
def test_chunks_of_a_method_hold_for_turns(policy: str, settings: dict[str, Any], first: int, x64: None) -> None:
    chosen = kvjax.policy(policy, **settings)
    reading: dict[str, Any] = dict(policy=chosen, budget=14, prefill_chunk=None)
    whole, expected = read(POLICIES["lsh_e"], (50, 50 - first), max_new_tokens=20, **reading)
    state, _ = read(POLICIES["lsh_e"], (first, first), max_new_tokens=70 - first, **reading)
    state, every, _ = turn(state, (50 - first, 50 - 2 * first))
    same(jnp.stack([every[0, -1], every[1, 49 - 2 * first]]), expected)
    for row in range(2):
        assert kept(state, row) == kept(whole, row)


def test_chunks_of_a_turn_equal_turns(x64: None) -> None:
    state, _ = read(POLICIES["h2o"])
    pieces, seen = state, []
    for counts in ((8, 8), (8, 5), (4, 0)):
        pieces, logits, _ = turn(pieces, counts)
        seen.append(np.asarray(logits))
    texts = [
        TEXT[row, place : place + count].tolist()
        for row, (place, count) in enumerate(zip(LENGTHS, (20, 13), strict=True))
    ]
    after, last = kvjax.extend(state, texts, prefill_chunk=8)
    _, every = kvjax.extend(state, texts, logits="all", prefill_chunk=8)
    same(every, np.concatenate(seen, axis=1))
    same(last, [every[0, 19], every[1, 12]])
    assert [kept(after, row) for row in range(2)] == [kept(pieces, row) for row in range(2)]
    steps, found = write(state, 13)
    after, every = kvjax.extend(state, [text[:13] for text in texts], logits="all", prefill_chunk=1)
    same(every, np.stack(found, axis=1))
    assert [kept(after, row) for row in range(2)] == [kept(steps, row) for row in range(2)]


@pytest.mark.parametrize("name", ["full", "fastgen", slow("baseline_plus"), "h2o", "lightkv", "streaming+adakv"])
def test_logits_are_those_of_the_forward_pass_when_there_is_room(name: str, x64: None) -> None:
    case = CASES[name]
    policy = case.make(**case.full)
    budget: Any = [64] * GQA.layers if policy.plan.sizing.mode == "budget" else 1.0
    plan = case.plan if policy.plan.sizing.per_head else None
    state, first = read(case, (20, 12), policy=policy, budget=budget, plan=plan)
    expected = np.asarray(model().logits(TEXT[:, :48]))
    same(first, expected[[0, 1], [19, 11]])
    state, found = write(state, 3)
    same(found, [expected[[0, 1], [20 + step, 12 + step]] for step in range(3)])
    state, found, _ = turn(state, (20, 13))
    same(found[0], expected[0, 23:43])
    same(found[1, :13], expected[1, 15:28])
    last = turn(state, (5, 1), logits="last")[1]
    same(last, expected[[0, 1], [47, 28]])


@pytest.mark.parametrize(
    "name",
    [
        *("h2o", "keyformer", "less-performer", "h2o+int8"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("snapkv", "scissorhands", "l2", "h2o-cache-positions")
        ),
    ],
)
def test_two_turns_on_pages_equal_dense_slots(name: str, x64: None) -> None:
    ends = []
    for plan in (None, AdaKV(floor=1.0)):
        state, logits = read(CASES[name], (41, 30), plan=plan)
        assert (state.cache.pool is not None) is (plan is not None)
        seen = [np.asarray(logits)]
        for counts in ((16, 9), (0, 5)):
            state, found = write(state, 6)
            state, logits, _ = turn(state, counts, logits="last")
            seen += [*found, np.nan_to_num(logits)]
        ends.append((np.stack(seen), [kept(state, row) for row in range(2)]))
    same(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def test_a_state_stays_valid_and_a_program_serves_a_bucket(x64: None) -> None:
    state, _ = read(POLICIES["h2o"])
    before = [np.asarray(leaf) for leaf in jax.tree.leaves((state.cache.memory, state.position))]
    _, found, _ = turn(state, (10, 3))
    count = engine.read_more._cache_size()
    _, again, _ = turn(state, (16, 16))
    assert engine.read_more._cache_size() == count
    same(found[:, :3], again[:, :3])
    for old, leaf in zip(before, jax.tree.leaves((state.cache.memory, state.position)), strict=True):
        np.testing.assert_array_equal(old, leaf)


def test_fastgen_reads_up_to_its_planned_end(x64: None) -> None:
    state, _ = read(POLICIES["fastgen"], max_new_tokens=30)
    state, _ = write(state, 5)
    after, logits, _ = turn(state, (25, 25), logits="last")
    assert np.isfinite(logits).all()
    for layer, limit in enumerate(slot_limits(after)):
        for row in range(2):
            held = kept(after, row)[layer]
            assert all(len(head) <= slots for head, slots in zip(held, limit[row], strict=True))
            # The newest token is everywhere.
            assert all(head[-1] == int(after.position[row]) - 1 for head in held)
    with pytest.raises(ValueError, match=r"a text of 72 tokens does not fit the 71 that fastgen allocated"):
        turn(after, (1, 0))
    assert np.isnan(kvjax.decode_step(after, jnp.zeros(2, jnp.int32))[1]).all()


@pytest.mark.parametrize(
    "name", [*("h2o", "keyformer", "snapkv", "h2o+int8"), *map(slow, ("streaming", "tova", "scissorhands"))]
)
@pytest.mark.compiled_well
def test_a_long_turn_needs_less_than_one_matrix_of_its_length(name: str) -> None:
    n = 8192
    long = random_model(small_config(4, 2, layers=1, max_positions=2 * n))
    state, _ = kvjax.prefill(long, CASES[name].make(), np.zeros((1, 40), int), 128, max_new_tokens=n)
    lowered = engine.read_more.lower(
        state.decoder, state.cache, jnp.zeros((1, n), jnp.int32), jnp.full(1, n, jnp.int32), all_logits=False
    )
    memory = lowered.compile().memory_analysis()
    if memory is None:
        pytest.skip("this backend has no memory analysis")
    assert memory.temp_size_in_bytes < 4 * n * n


@pytest.mark.parametrize(
    ("tokens", "arguments", "message"),
    [
        ([[1, 2]], {}, "text for each of 2 rows"),
        (np.zeros(3, int), {}, "text for each of 2 rows"),
        (np.zeros((2, 0), int), {}, "text for each of 2 rows"),
        ([[1], [99]], {}, "token 99 is not in the vocabulary of 64"),
        ([[1], [-1]], {}, "token -1 is not in the vocabulary of 64"),
        (np.zeros((2, 3), int), {"lengths": [4, 1]}, r"lengths=\[4, 1\] do not fit"),
        (np.zeros((2, 3), int), {"lengths": [1]}, r"lengths=\[1\] do not fit"),
        (np.zeros((2, 3), int), {"lengths": [-1, 1]}, r"lengths=\[-1, 1\] do not fit"),
        ([[1], [2]], {"logits": "some"}, "logits='some' is not 'last' or 'all'"),
        (np.zeros((2, 4090), int), {}, "longer than the model's 4096 positions"),
        (np.full((2, 3), 0.5), {}, "tokens of type float64 are no token ids; give integers"),
        ([[0.5], [1]], {}, "tokens of type float64 are no token ids; give integers"),
        ([[1], [2]], {"prefill_chunk": 0}, "prefill_chunk=0"),
    ],
)
def test_bad_text_is_one_sentence(tokens: Any, arguments: dict[str, Any], message: str) -> None:
    small = random_model(GQA)
    state, _ = kvjax.prefill(small, "h2o", TEXT[:, :20], 16, max_new_tokens=20)
    with pytest.raises(ValueError, match=message) as raised:
        kvjax.extend(state, tokens, **arguments)
    assert "\n" not in str(raised.value)
    full, _ = kvjax.prefill(small, "full", TEXT[:, :20], max_new_tokens=4)
    with pytest.raises(ValueError, match=r"25 tokens does not fit the 24 that full allocated"):
        kvjax.extend(full, np.zeros((2, 5), int))


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        (([1] * 8, [1] * 5), "a text of 18 tokens does not fit the 14 that full allocated in row 0"),
        (([1] * 3, [1] * 5), "a text of 35 tokens does not fit the 34 that full allocated in row 1"),
    ],
)
def test_a_row_that_outgrows_its_plan_is_named(turns: tuple[list[int], ...], message: str) -> None:
    state, _ = kvjax.prefill(random_model(GQA), "full", [[1] * 10, [1] * 30], max_new_tokens=4)
    with pytest.raises(ValueError, match=message):
        kvjax.extend(state, turns)


@pytest.mark.parametrize("lengths", [[2.7, 1.2], [True, True]])
def test_lengths_of_turns_are_whole_numbers(lengths: list[Any]) -> None:
    state, _ = kvjax.prefill(random_model(GQA), "full", TEXT[:, :20], max_new_tokens=4)
    with pytest.raises(TypeError, match="are not whole numbers of tokens"):
        kvjax.extend(state, np.ones((2, 4), int), lengths)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("l2", {"recent": 0}),  # the token being read stays although nothing protects it
        slow("h2o", {"recent": 2}),
        slow("lambda_mask", {}),
        ("h2o", {"recent": 2, "plan": "adakv"}),
    ],
)
def test_where_special_tokens_outnumber_slots_the_oldest_of_them_leaves(name: str, settings: dict[str, Any]) -> None:
    """Whether a text is read as a prompt, as a turn or token by token."""
    special, budget, begun = 7, 8, 10
    rng = np.random.default_rng(0)
    text = rng.integers(8, GQA.vocab_size, 30)
    text[rng.permutation(30)[:18]] = special
    text[-1] = 9
    policy = kvjax.policy(name, **({"special": (special,), "sinks": 2} | settings))
    plain = random_model(GQA)
    turned, _ = kvjax.prefill(plain, policy, [text[:begun].tolist()], budget, max_new_tokens=40)
    stepped = turned
    for token in text[begun:]:
        stepped, _ = kvjax.decode_step(stepped, [int(token)])
    turned, _ = kvjax.extend(turned, [text[begun:].tolist()])
    found = [kept(turned, 0), kept(stepped, 0)]
    protected = {*np.flatnonzero(text == special).tolist(), *range(30 - max(1, settings.get("recent", 0)), 30)} - {0, 1}
    wanted = [0, 1, *sorted(protected)[2 - budget :]]
    if policy.plan.sizing.per_head:
        assert all(head[:2] == [0, 1] and set(head[2:]) <= protected for layer in found[0] for head in layer)
    else:
        prompt, _ = kvjax.prefill(plain, policy, [text.tolist()], budget, max_new_tokens=40)
        found.append(kept(prompt, 0))
        assert found[0] == [[wanted] * 2] * 2
    assert all(each == found[0] for each in found)
