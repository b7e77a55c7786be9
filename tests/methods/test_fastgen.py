"""FastGen's choices and memory, and heads with budgets of their own; its steps are compared in test_oracles.py."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import generate
from kvjax.cache import recompute
from kvjax.cache.paged.pages import Pool
from kvjax.cache.paged.table import round_pages
from kvjax.inference import decode, decoder, prefill, press
from kvjax.inference.cache import Cache
from kvjax.inference.padding import round_slots
from kvjax.inference.prepare import prepare
from kvjax.inference.state import State, held_positions, slot_limits
from kvjax.methods.adakv import AdaKV
from kvjax.models import Rope
from tests.cases import fastgen_case, in_turns, slow
from tests.oracles.decoder import Decoder
from tests.small_models import GQA, MHA, random_model, small_config

RNG = np.random.default_rng(5)
TEXT = RNG.integers(0, 64, (8, 700))
LENGTHS = (41, 25, 33)
IDS = {"special": (7, 9), "punctuation": (11, 13, 20, 30)}
PROMPTS = """\
One day, a little girl named Lily went to the park with her dog, Max. They ran and ran! Then Max saw a cat.
Tom had a red ball. He liked to play with it, but it was old; so he asked his mom: "Can I have a new one?"
The sun was hot. A bird sat in a tree and sang a song. The song was long and sad, and all the animals came to
Anna and Ben were friends. They shared a box of toys, a book, and a big cake. "Yum!" said Ben. "More!" said Anna.
Once upon a time there was a king. He had gold. He had horses. He had a castle on a hill. But he had no friends
It was raining, so Sue stayed home. She drew a cow, a pig, a hen and a horse. Then she drew herself, smiling at
"Stop!" cried the farmer. "Who ate my carrots?" The rabbit looked at the sky. The fox looked at the ground. No
Grandpa told a story about a ship, a storm and a whale as big as a house. Everybody listened. Nobody moved until
""".splitlines()


@pytest.fixture(scope="module")
def tiny():
    return kvjax.load("tiny")


def read(model, prompts, *, max_new_tokens=64, **settings):
    return kvjax.prefill(model, kvjax.policy("fastgen", **settings), prompts, max_new_tokens=max_new_tokens)


def choices(state) -> np.ndarray:
    """[layers, b, h]"""
    return np.array([np.asarray(heads.state.plan.choice) for heads in state.cache.attending])


def pool(state) -> Pool:
    assert state.cache.pool is not None
    return state.cache.pool


@pytest.mark.parametrize("threshold", [0.2, slow(0.5), 0.7, slow(0.8), 0.9])
def test_every_head_chooses_as_the_oracle_does(threshold, x64):
    model = random_model(GQA, seed=3, dtype=jnp.float64)
    prompts = [TEXT[row, :length].tolist() for row, length in enumerate((57, 18, 40))]
    case = fastgen_case(threshold)
    state, _ = kvjax.prefill(model, case.make(), prompts, max_new_tokens=20)
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), model.weights)
    limits = slot_limits(state)
    for row, prompt in enumerate(prompts):
        oracles: list[Any] = case.oracles(state, row, len(prompt) + 20)
        Decoder(weights, GQA, oracles, horizon=20).prompt(prompt)
        for layer, oracle in enumerate(oracles):
            assert choices(state)[layer, row].tolist() == oracle.chosen
            assert limits[layer][row].tolist() == oracle.slots


@pytest.mark.parametrize(("rows", "threshold"), in_turns([1, 8], [0.6, 0.9]))
def test_memory_is_what_the_heads_call_for(tiny, rows, threshold):
    prompts = [tiny.tokenizer(" ".join([text] * 4))["input_ids"][: 60 + 9 * row] for row, text in enumerate(PROMPTS)]
    new_tokens, ratio = 64, 0.3
    state, _ = read(tiny, prompts[:rows], max_new_tokens=new_tokens, threshold=threshold)
    classes = tiny.token_classes
    called = 0
    held = [(positions >= 0).sum(-1) for positions in held_positions(state)]
    for heads, filled in zip(choices(state), held, strict=True):
        for prompt, head, few in zip(prompts, heads, filled, strict=False):
            special = sum(token in classes.special for token in prompt)
            marks = sum(token in classes.punctuation for token in prompt)
            end = len(prompt) + new_tokens
            marks += math.ceil(0.35 * new_tokens)
            before, after = (int(ratio * length + 1e-6) for length in (end - 1, end))
            most = [special + 8 + 1, special + 8 + marks + 1, special + 8 + marks + max(before + 1, after)]
            most = [min(slots, end) for slots in (*most, special + 8 + marks + max(2 * before + 1, 2 * after), end)]
            called += sum(min(most[choice], count + new_tokens) for choice, count in zip(head, few, strict=True))
    config = tiny.config
    # Key, value, position, accumulated attention, and whether it is kept for what it is.
    slot = 2 * config.head_width * 4 + 4 + 4 + 1
    allocated = sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache.memory))
    assert allocated == kvjax.cache_bytes(state)
    page = pool(state).page_size
    assert called * slot <= allocated < 1.1 * called * slot + rows * config.layers * config.kv_heads * page * slot
    assert called == sum(limit.sum() for limit in slot_limits(state))


def test_heads_differ_and_memory_falls_with_the_threshold(tiny):
    prompts = [tiny.tokenizer(text)["input_ids"] for text in PROMPTS]
    sizes, states = [], {}
    for threshold in (0.5, 0.8, 0.95, 1.0):
        states[threshold], _ = read(tiny, prompts, threshold=threshold)
        sizes.append(kvjax.cache_bytes(states[threshold]))
        kinds = np.unique(choices(states[threshold])).tolist()
        assert (len(kinds) > 2) if threshold == 0.5 else (kinds == [4]) if threshold == 1 else True
    assert sizes == sorted(sizes) and sizes[0] < 0.6 * sizes[-1]
    # Section 3.2's union: frequent tokens share their places with those that stay anyway.
    union, (apart, _) = states[0.8], read(tiny, prompts, threshold=0.8, frequent_among="others")
    assert (choices(union) >= choices(apart)).all()
    same = (choices(union) == choices(apart)) & np.isin(choices(union), [2, 3])
    few, many = (np.array([(layer >= 0).sum(-1) for layer in held_positions(state)]) for state in (union, apart))
    assert same.any() and (few <= many)[same].all() and (few < many)[same].any()


def test_a_second_prompt_of_the_bucket_compiles_nothing():
    model, policy = random_model(GQA), fastgen_case(0.75).make()
    # As many programs as there are sizes of pools, whatever each head of each prompt has got.
    sizes, layouts, compiled = set(), set(), []
    for row in range(4):
        prompts = [TEXT[row, :330].tolist(), TEXT[row, 340 : 700 - 5 * row].tolist()]
        for batch in (prompts, prompts[::-1]):
            state, _ = kvjax.prefill(model, policy, batch, max_new_tokens=40)
            decode.decode_step_in_place(jax.tree.map(jnp.copy, state), jnp.zeros(2, jnp.int32))
            sizes.add(pool(state).position.shape)
            layouts.add(np.asarray(pool(state).owner).tobytes())
            programs: list[Any] = [prefill.read_together, press.pack_pages, decoder.compiled_step_in_place]
            compiled.append([program._cache_size() for program in programs])
    reads, packs, steps = (after - before for before, after in zip(compiled[0], compiled[-1], strict=True))
    assert reads == 0 and packs == steps == len(sizes) - 1
    assert len(layouts) > len(sizes)


@pytest.mark.compiled_well
def test_a_step_needs_no_memory_beside_its_pool():
    state, _ = read(random_model(MHA), TEXT[:2, :41], threshold=1.0, max_new_tokens=2000, **IDS)
    memory = decode.lower_step(state).compile().memory_analysis()
    if memory is None:
        pytest.skip("this backend has no memory analysis")
    pages = pool(state)
    changing = sum(leaf.nbytes for leaf in jax.tree.leaves((pages.kv, pages.position, pages.slots)))
    assert memory.alias_size_in_bytes >= changing
    # The logits of all pages, of d = 8 here and of 64 and more in models, and a block of pages.
    assert memory.temp_size_in_bytes < 3 * 4 * pages.position.size + 200_000


def test_logits_end_where_the_slots_do():
    state, _ = read(random_model(GQA), TEXT[:1, :20], max_new_tokens=2, threshold=0.5, **IDS)
    for finite in (True, True, False):
        state, logits = kvjax.decode_step(state, jnp.zeros(1, jnp.int32))
        assert bool(np.isfinite(logits).all()) is finite


@pytest.mark.parametrize("changes", [dict(position="alibi", rope=None), dict(sliding_window=16)])
def test_distance_biases_and_sliding_windows_reach_pages(changes):
    model = random_model(small_config(4, 2, **({"rope": Rope(width=8)} | changes)))
    state, logits = read(model, TEXT[:2, :41], threshold=1.0, **IDS)
    full, expected = kvjax.prefill(model, "full", TEXT[:2, :41], max_new_tokens=64)
    np.testing.assert_allclose(logits, expected, atol=2e-5)
    for step in range(20):
        token = jnp.asarray(TEXT[:2, 50 + step])
        (state, logits), (full, expected) = kvjax.decode_step(state, token), kvjax.decode_step(full, token)
        np.testing.assert_allclose(logits, expected, atol=2e-5)


@pytest.mark.parametrize(
    "order, expected",
    [
        (("punctuation", "frequent", "local"), [("punctuation",), ("punctuation", "frequent")]),
        (("special", "frequent", "local"), [("special",), ("special", "frequent")]),
        (("special", "punctuation", "local"), [("special",), ("special", "punctuation")]),
        (("special", "frequent", "local", "punctuation"), [("special",), ("special", "frequent")]),
    ],
)
def test_choices_of_tables_4_and_5(order, expected):
    policy: Any = kvjax.policy("fastgen", order=order)
    assert policy.plan.choices[:2] == tuple(expected)
    assert policy.plan.choices[-2:] == (order, ())


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(threshold=0), "threshold=0"),
        (dict(local=1.5), "local=1.5"),
        (dict(frequent=-0.1), "frequent=-0.1"),
        (dict(order=("local", "local")), "order="),
        (dict(order=("locals",)), "order="),
        (dict(order=()), "one or more of special"),
        (dict(recent=0.5), "recent=0.5"),
        (dict(spare_special=-1), "spare_special=-1"),
        (dict(spare_punctuation=2.0), "spare_punctuation=2.0"),
        (dict(frequent_among="some"), "frequent_among='some' is not 'all' or 'others'"),
    ],
)
def test_bad_settings_are_one_sentence(settings, message):
    with pytest.raises(ValueError, match=message):
        kvjax.policy("fastgen", **settings)


def test_a_bound_policy_fits_one_vocabulary():
    bound = kvjax.policy("fastgen", **IDS).bind(random_model(GQA))
    assert bound.bind(random_model(GQA)).protection is bound.protection
    with pytest.raises(ValueError, match="vocabulary of 64"):
        bound.bind(random_model(small_config(4, 2, vocab_size=80)))


def test_classes_are_those_of_all_ids_that_there_are() -> None:
    bound = kvjax.policy("fastgen", special=(0, 63), punctuation=(5, 63, 64, 900)).bind(random_model(GQA))
    protection: Any = bound.protection
    assert {i: int(bits) for i, bits in enumerate(protection.classes) if bits} == {0: 1, 5: 2, 63: 3}


def test_long_prompts_are_profiled_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The local window's share of attention does not depend on how many queries are looked at together."""
    prompts = TEXT[:2, :96]
    settings: dict[str, Any] = dict(local=0.6, threshold=0.9, **IDS)
    whole, _ = read(random_model(GQA), prompts, **settings)
    monkeypatch.setattr(recompute, "query_block", lambda tokens, rows: 16)
    prefill.read_together.clear_cache()  # type: ignore[attr-defined]
    blocks, _ = read(random_model(GQA), prompts, **settings)
    prefill.read_together.clear_cache()  # type: ignore[attr-defined]
    for one, other in zip(whole.cache.attending, blocks.cache.attending, strict=True):
        np.testing.assert_allclose(one.state.plan.recovered, other.state.plan.recovered, atol=1e-5)


def dense_with_limits(model, policy, budget, limits):
    """The same policy on dense buffers where each head may use its own share: what pages must equal."""
    prompts = prepare(model, policy, TEXT[:3, :41], budget, LENGTHS, max_new_tokens=40, key=None, plan=None, chunk=None)
    prompts = prompts._replace(
        limits=tuple(np.asarray(limit, np.int32) for limit in limits),
        capacities=tuple(round_slots(int(limit.max())) for limit in limits),
    )
    arrays = prefill.program_arguments(prefill.bound_prompts(model, prompts), prompts)
    layers, _, seed, logits = prefill.read_together(*arrays, **prefill.program_settings(prompts))
    start, horizon = jnp.asarray(prompts.lengths), jnp.asarray(prompts.horizon)
    active = jnp.ones(start.shape, bool)
    ends = start + horizon
    of_rows = (start, start, horizon, ends, prompts.keys, seed, active)
    made = decoder.Decoder(weights=model.weights, policy=prompts.policy, config=model.config)
    return State(made, Cache(layers, *of_rows)), logits


@pytest.mark.parametrize(
    "name, floor",
    [("snapkv", 0.2), slow("snapkv", 1.0), slow("keyformer", 0.2), ("keyformer", 1.0), ("h2o", 0.2), ("random", 0.2)],
)
def test_pages_equal_dense_buffers_with_the_same_limits(name, floor):
    model = random_model(GQA, seed=2)
    policy = kvjax.policy(name, recent=6)
    state, logits = kvjax.prefill(
        model, policy, TEXT[:3, :41], 20, lengths=LENGTHS, max_new_tokens=40, plan=AdaKV(floor=floor)
    )
    limits = slot_limits(state)
    assert all((limit.sum(1) == 2 * 20).all() for limit in limits)
    assert floor == 1.0 or any((limit != 20).any() for limit in limits)
    dense, expected = dense_with_limits(model, policy, 20, limits)
    for step in range(40):
        np.testing.assert_allclose(logits, expected, atol=1e-5)
        for pages, buffers in zip(held_positions(state), held_positions(dense), strict=True):
            for a, b in zip(pages.reshape(-1, pages.shape[-1]), buffers.reshape(-1, buffers.shape[-1]), strict=True):
                assert set(a.tolist()) - {-1} == set(b.tolist()) - {-1}
        token = jnp.asarray(TEXT[:3, 50 + step])
        (state, logits), (dense, expected) = kvjax.decode_step(state, token), kvjax.decode_step(dense, token)


@pytest.mark.parametrize("name", ["h2o", "snapkv", "keyformer", "lsh_e"])
def test_every_head_counts_the_places_of_its_own_tokens(name, x64):
    """Pages equal dense buffers where the model sees places in the cache, over heads with slots of their own."""
    # One token more than texts have, which can be protected and never comes.
    model = random_model(dataclasses.replace(GQA, vocab_size=65), seed=2, dtype=jnp.float64)
    settings: dict[str, Any] = {"prompt": "one_shot"} if name == "lsh_e" else {}
    policy = kvjax.policy(name, positions="cache", recent=4, plan=AdaKV(floor=0.2), **settings)
    state, logits = kvjax.prefill(model, policy, TEXT[:3, :41], 20, lengths=LENGTHS, max_new_tokens=40)
    limits = slot_limits(state)
    assert policy.codec.ordered and any((limit != 20).any() for limit in limits)
    uniform = kvjax.policy(name, positions="cache", recent=4, special=(64,), **settings)
    assert uniform.codec.ordered
    dense, expected = dense_with_limits(model, uniform, 20, limits)
    for step in range(30):
        np.testing.assert_allclose(logits, expected, atol=1e-9)
        token = jnp.asarray(TEXT[:3, 50 + step])
        (state, logits), (dense, expected) = kvjax.decode_step(state, token), kvjax.decode_step(dense, token)


@pytest.mark.parametrize("floor", [0.0, 0.2, 0.7])
def test_adakv_counts_where_the_best_tokens_are(floor):
    rng = np.random.default_rng(1)
    ranks = rng.random((3, 4, 50)).astype(np.float32) * np.array([1, 2, 4, 8])[None, :, None]
    ranks[:, :, -3:] = np.inf  # protected
    ranks[:, :, :10] = np.finfo(np.float32).min  # empty
    budget = np.full((3, 4), 12)
    given = np.asarray(AdaKV(floor).split(jnp.asarray(ranks), jnp.asarray(budget), jnp.full((3, 1), 100)))
    assert (given.sum(1) == 48).all()
    for row in range(3):
        best = np.argsort(-ranks[row].reshape(-1))[:48] // 50
        share = floor * 12 + (1 - floor) * np.bincount(best, minlength=4)
        assert (np.abs(given[row] - share) < 1).all()
        assert (given[row] >= 3).all()


def test_adakv_gives_no_head_more_than_the_text():
    ranks = jnp.concatenate([jnp.ones((1, 1, 8)), jnp.zeros((1, 1, 8))], axis=1)
    given = AdaKV(0.0).split(ranks, jnp.full((1, 2), 10), jnp.full((1, 1), 11))
    assert np.asarray(given).max() <= 11
    with pytest.raises(ValueError, match="not a share"):
        AdaKV(1.5)


def test_a_pool_rounds_up_by_a_sixteenth_at_most():
    for pages in (1, 7, 16, 17, 31, 100, 1000, 12345):
        assert pages <= round_pages(pages) <= 17 * pages / 16


def test_the_command_line_shows_what_each_head_keeps(capsys):
    arguments = ["--policy", "fastgen", "--set", "threshold=0.7", "--prompt", PROMPTS[0], "--max-new-tokens", "4"]
    assert generate.main([*arguments, "--json"]) == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert report["choices"][-1] == "full" and np.shape(report["policy_map"]) == (4, 2) == np.shape(report["slots"])
    letters = [[" spflF"[1 + head] for head in layer] for layer in report["policy_map"]]
    lines = shown.err.splitlines()
    assert [line.split()[2:] for line in lines if line.startswith("layer")] == letters
    assert "s = special (" in lines[-1] and "F = full (" in lines[-1]


@pytest.mark.parametrize(
    ("spare", "said"), [(0.35, "punctuation that are written; 0 and "), (0.0, "the oldest may have left")]
)
def test_the_summary_says_whether_spare_slots_sufficed(
    spare: float, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--policy", "fastgen", "--prompt", "Once upon a time, there was a girl.", "--temperature", "0"]
    assert generate.main([*words, "--max-new-tokens", "20", "--set", f"spare_punctuation={spare}"]) == 0
    told = capsys.readouterr().err
    assert f"8 and {math.ceil(20 * spare)} slots are set aside" in told and said in told
