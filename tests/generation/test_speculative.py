"""Texts of a small cache that drafts and a full one that verifies are those of the full cache."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import generate
from kvjax.generation import adaptive
from kvjax.generation.adaptive import Cost, best_draft_tokens
from kvjax.generation.chat import Conversation
from kvjax.generation.generate import begin, generate_ids
from kvjax.generation.questions import answer
from kvjax.generation.sampling import Sampling
from kvjax.generation.speculative import draft_and_verify
from kvjax.inference.speculation import SpeculativeCache
from kvjax.models import ModelConfig, Rope
from kvjax.serving.engine import Engine
from tests.cases import FIRST, POLICIES, slow
from tests.small_models import (
    CONVOLVED,
    GQA,
    HYBRID,
    LATENT,
    LOCAL,
    MHA,
    MIXED,
    MQA,
    SINKS,
    SLOPED,
    SOURCES,
    random_model,
    small_config,
)

PROMPTS = [np.random.default_rng(row).integers(0, 64, size).tolist() for row, size in enumerate((41, 57, 48))]
MODELS = {"mha": MHA, "gqa": GQA, "mqa": MQA, "sinks": SINKS, "windows": LOCAL, "moe": MIXED, "alibi": SLOPED}
MODELS |= {"latent": LATENT, "recurrent": HYBRID, "convolutions": CONVOLVED, "layers that read others": SOURCES}


def both(model: Any, new: int = 40, policy: Any = "h2o", budget: Any = 17, **settings: Any) -> tuple[Any, Any]:
    """Generations of the full cache alone, and of a policy's drafts."""
    settings = {"max_new_tokens": new, "temperature": 0.0, **settings}
    full = generate_ids(model, PROMPTS, **settings)
    return full, generate_ids(model, PROMPTS, policy=policy, budget=budget, lossless=True, **settings)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_greedy_texts_of_every_model_are_those_of_the_full_cache(config: ModelConfig, x64: None) -> None:
    full, drafted = both(random_model(config, dtype=jnp.float64))
    assert drafted.tokens == full.tokens
    assert drafted.state.position.tolist() == full.state.position.tolist()
    assert all(rounds >= 39 / 5 for rounds in drafted.rounds)


KINDS = {
    # name of a case: what is new about its cache
    "less-performer": "a residual",
    "fastgen": "pages",
    "lsh_e": "a prompt that is read by decode steps",
    "h2o-cache-positions": "keys that are rotated when they are read",
    "keyformer": "random numbers",
    "topk_oracle": "a selection of slots",
}


@pytest.mark.parametrize("name", [name if name in KINDS else slow(name) for name in dict.fromkeys([*KINDS, *FIRST])])
def test_every_policy_drafts_for_the_full_cache(name: str, x64: None) -> None:
    case = POLICIES[name]
    if case.policy == "full":
        pytest.skip("keeps everything")
    policy = kvjax.policy(case.policy, **case.settings)
    settings: dict[str, Any] = {"plan": case.plan, "budget": case.budget, "prefill_chunk": case.prefill_chunk}
    full, drafted = both(random_model(GQA, dtype=jnp.float64), 300, policy, **settings)
    assert drafted.tokens == full.tokens


SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "top_k": {"temperature": 2.0, "top_k": 5},
    "top_p": {"temperature": 1.5, "top_p": 0.7},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "penalty": {"temperature": 0.7, "repetition_penalty": 1.5},
    "greedy penalty": {"temperature": 0.0, "repetition_penalty": 1.5},
    "samples": {"temperature": 1.0, "num_samples": 2, "seed": 3},
    "ends": {"temperature": 1.0, "stop_token_ids": list(range(0, 64, 7))},
    "logprobs": {"temperature": 1.0, "logprobs": 2},
    "in 8 drafts": {"temperature": 1.0, "draft_tokens": 8},
    "in single drafts": {"temperature": 1.0, "draft_tokens": 1},
    "in as many drafts as pay": {"temperature": 1.0, "draft_tokens": "auto"},
}


@pytest.mark.parametrize("settings", SAMPLED.values(), ids=SAMPLED)
def test_sampled_texts_are_those_of_the_full_cache_with_the_same_seed(settings: dict[str, Any], x64: None) -> None:
    full, drafted = both(random_model(GQA, dtype=jnp.float64), **settings)
    assert drafted.tokens == full.tokens
    if full.logprobs is not None:
        for ours, expected in zip(*map(itertools.chain.from_iterable, (drafted.logprobs, full.logprobs)), strict=True):
            assert ours.token == expected.token
            np.testing.assert_allclose(ours.logprob, expected.logprob, rtol=1e-6)
            assert [id for id, _ in ours.likeliest] == [id for id, _ in expected.likeliest]


def test_texts_stop_where_the_full_cache_s_do() -> None:
    model = kvjax.load("tiny")
    settings: dict[str, Any] = {"max_new_tokens": 60, "temperature": 0.0, "stop": ["."]}
    prompts = ["Once upon a time", "The dog was big. He"]
    expected = model.generate(prompts, **settings)
    settings |= {"policy": "h2o", "budget": 16, "lossless": True}
    assert model.generate(prompts, **settings) == expected
    assert ["".join(model.stream(prompt, **settings)) for prompt in prompts] == expected
    ids = [model.tokenizer.encode(prompts[0])]
    batch = begin(model, ids, **settings)
    for block, _ in batch.pieces():
        if block is not None:
            batch.state = block.state
    generated = generate_ids(model, ids, **(settings | {"lossless": False, "policy": "full", "budget": 1.0})).tokens[0]
    assert batch.state.position.tolist() == [len(ids[0]) + len(generated) - 1], "tokens after a stop string are read"


def test_a_draft_that_keeps_everything_agrees() -> None:
    _, drafted = both(kvjax.load("tiny"), 41, "h2o", 128)
    assert drafted.rounds == [8, 8, 8]
    assert drafted.tokens_per_round == 5


def test_the_verifier_may_be_in_8_bits(x64: None) -> None:
    model, codes = random_model(GQA, dtype=jnp.float64), kvjax.policy("full", codec="int8")
    speculation = kvjax.speculation(model, "h2o", 17, verifier=codes)
    cache, logits = speculation.prefill(PROMPTS, max_new_tokens=30)
    expected = generate_ids(model, PROMPTS, policy=codes, max_new_tokens=25, temperature=0.0).tokens
    texts = [[int(token)] for token in logits.argmax(-1)]
    while min(map(len, texts)) < 25:
        token = jnp.asarray([text[-1] for text in texts])
        cache, tokens, counts = kvjax.speculate(speculation, cache, token)
        for text, ids, count in zip(texts, tokens.tolist(), counts.tolist(), strict=True):
            text += ids[:count]
    assert [text[:25] for text in texts] == expected


def test_rounds_run_in_a_scan_under_jit(x64: None) -> None:
    speculation = kvjax.speculation(random_model(GQA, dtype=jnp.float64), "tova", 17, draft_tokens=2)
    cache, logits = speculation.prefill(PROMPTS, max_new_tokens=30)
    sampling, rows = Sampling(1.0, top_k=8), jnp.arange(3)

    def one(carry: Any, _: None) -> Any:
        cache, token = carry
        cache, tokens, counts = kvjax.speculate(speculation, cache, token, sampling)
        return (cache, tokens[rows, counts - 1]), (tokens, counts)

    start = cache, logits.argmax(-1).astype(jnp.int32)
    (after, _), scanned = jax.jit(lambda start: jax.lax.scan(one, start, None, length=4))(start)
    carry = start
    for number in range(4):
        carry, outputs = one(carry, None)
        jax.tree.map(lambda all, alone, at=number: np.testing.assert_array_equal(all[at], alone), scanned, outputs)
    assert after.position.tolist() == carry[0].position.tolist()
    assert (after.lag < 3).all()


def test_rows_do_not_depend_on_their_neighbours(x64: None) -> None:
    model = random_model(GQA, dtype=jnp.float64)
    settings: dict[str, Any] = {"policy": "h2o", "budget": 17, "lossless": True, "max_new_tokens": 30}
    together = generate_ids(model, PROMPTS, seed=[4, 5, 6], **settings)
    for row, prompt in enumerate(PROMPTS):
        alone = generate_ids(model, [prompt], seed=4 + row, **settings)
        assert (alone.tokens[0], alone.rounds[0]) == (together.tokens[row], together.rounds[row])


def test_a_state_of_two_caches_is_extended_stepped_and_split_as_any_other(x64: None) -> None:
    model = random_model(GQA, dtype=jnp.float64)
    speculation, texts = kvjax.speculation(model, "h2o", 48), [list(prompt) for prompt in PROMPTS]
    cache, logits = speculation.prefill(PROMPTS, max_new_tokens=40)
    token = logits.argmax(-1)
    for _ in range(3):
        cache, tokens, counts = kvjax.speculate(speculation, cache, token)
        for text, newest, ids, count in zip(texts, token.tolist(), tokens.tolist(), counts.tolist(), strict=True):
            text += [newest, *ids[: count - 1]]
        token = tokens[jnp.arange(3), counts - 1]
    assert cache.lag.max() > 0
    drafted = kvjax.State(speculation.for_steps(), cache)
    full, _ = kvjax.prefill(model, "full", texts, max_new_tokens=40)
    assert drafted.position.tolist() == full.position.tolist()
    for read in (
        lambda state: kvjax.extend(state, [[5, 6, 7], [8], [9, 10]]),
        lambda state: kvjax.decode_step(state, [1, 2, 3]),
    ):
        drafted, logits = read(drafted)
        full, expected = read(full)
        np.testing.assert_allclose(logits, expected, rtol=1e-9, atol=1e-9)
        assert isinstance(drafted.cache, SpeculativeCache)
        assert drafted.cache.lag.tolist() == [0, 0, 0]
    swapped = kvjax.put_rows(drafted, [0, 2], kvjax.take_rows(drafted, [2, 0]))
    assert kvjax.cache_bytes(swapped) == kvjax.cache_bytes(drafted) > kvjax.cache_bytes(full)
    _, logits = kvjax.decode_step(swapped, [1, 2, 3])
    _, expected = kvjax.decode_step(kvjax.take_rows(full, [2, 1, 0]), [1, 2, 3])
    np.testing.assert_allclose(logits, expected, rtol=1e-9, atol=1e-9)


def test_a_round_works_in_place() -> None:
    speculation = kvjax.speculation(
        random_model(small_config(4, 2, head_width=64, rope=Rope(width=64))), "streaming", 16
    )

    def memory(new: int) -> Any:
        cache, logits = speculation.prefill(PROMPTS, max_new_tokens=new)
        none = jnp.zeros(logits.shape, bool)
        texts = cache.key, logits.argmax(-1).astype(jnp.int32), none, none[0], Sampling(0.0), cache.end
        program = jax.jit(draft_and_verify, donate_argnums=1).lower(
            speculation.for_steps(), cache.replace(key=None), *texts
        )
        keys = sum(leaf.nbytes for slots in cache.slots for leaf in jax.tree.leaves(slots.kv))
        return program.compile().memory_analysis(), keys

    (short, _), (long, keys) = memory(500), memory(2500)
    assert long.alias_size_in_bytes >= keys
    # Logits of attention, one number for each key of each query and head, are all that grows.
    assert long.temp_size_in_bytes - short.temp_size_in_bytes <= 3 * 2048 * 4 * 5 * 8


@pytest.mark.parametrize(
    ("tokens_per_round", "sizes", "expected"),
    [
        (4.9, (1, 0, 100), 8),  # the full cache is all that counts, and nearly all guesses are right
        (3.0, (100, 6, 300), 2),
        (3.0, (100, 1, 5), 0),  # weights are all that counts
        (1.0, (1, 0, 100), 0),
    ],
)
def test_as_many_tokens_are_drafted_as_pay(tokens_per_round: float, sizes: tuple[int, int, int], expected: int) -> None:
    weights, draft, full = sizes
    cost = Cost(weights + full, 4 * (weights + draft) + weights + full)
    assert best_draft_tokens(tokens_per_round, cost) == expected


@pytest.mark.parametrize("count", [0, 2, 8])
def test_texts_do_not_depend_on_the_choice_of_draft_tokens(count: int, monkeypatch: Any, x64: None) -> None:
    monkeypatch.setattr(adaptive, "bytes_read", lambda *_: Cost(1.0, 1.1))
    choices = [count, 4]  # 4 before any guess
    monkeypatch.setattr(adaptive, "best_draft_tokens", lambda *_: choices.pop())
    full, drafted = both(random_model(GQA, dtype=jnp.float64), 60, temperature=0.9, draft_tokens="auto")
    assert drafted.tokens == full.tokens
    assert len(drafted.state.decoder.decoders) == (2 if count else 1) and choices == []
    if count:
        assert repr(drafted.padded.decoder) == f"Speculation(h2o drafts {count} tokens for full)"
    trial = 59 - 8  # tokens after the first one, and after eight steps of the full cache
    assert all(rounds > 0 for rounds in drafted.rounds) and drafted.verified_tokens <= trial * len(PROMPTS)


def test_drafts_that_do_not_pay_are_switched_off() -> None:
    generation = generate_ids(
        *(kvjax.load("tiny"), PROMPTS[:1]),
        **{"policy": "streaming", "budget": 8, "lossless": True, "draft_tokens": "auto", "max_new_tokens": 60},
    )
    assert len(generation.state.decoder.decoders) == 1, "weights outweigh a cache of 100 tokens"
    assert generation.rounds == [0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "full"}, "policy full cannot draft for itself; give one with a smaller cache"),
        ({"policy": "h2o", "budget": 17, "beams": 2}, "lossless=True has no effect on a beam search"),
        ({"policy": "h2o", "budget": 17, "draft_tokens": 17}, "draft_tokens=17 is not a whole number from 1 to 16"),
        ({"policy": "h2o", "budget": 17, "verifier": "streaming"}, "streaming evicts tokens, which no roll-back"),
        ({"policy": "streaming", "budget": 17, "refresh": True}, "streaming ranks without attention"),
        (
            {"policy": "h2o", "budget": 17, "refresh": True, "verifier": kvjax.policy("full", memory="host")},
            "ranks the slots of the full cache, which memory='host' moves",
        ),
    ],
)
def test_what_cannot_be_drafted_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate_ids(kvjax.load("tiny"), PROMPTS, lossless=True, max_new_tokens=8, **settings)


def test_a_verifier_without_drafts_is_refused() -> None:
    with pytest.raises(ValueError, match="verifier='full' has no effect without lossless=True; give that, too"):
        kvjax.load("tiny").generate("The dog", verifier=kvjax.policy("full", codec="int8"), max_new_tokens=8)
    with pytest.raises(ValueError, match="verifier='h2o' has no effect without lossless=True"):
        Engine(kvjax.load("tiny"), verifier="h2o")


def test_a_verifier_that_evicts_is_refused() -> None:
    with pytest.raises(ValueError, match="h2o evicts tokens, which no roll-back brings back"):
        kvjax.speculation(kvjax.load("tiny"), "streaming", 16, verifier="h2o")


def test_the_commands_write_the_full_cache_s_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [
        "--model",
        "tiny",
        "--prompt",
        "Once upon a time there was a dog",
        "-n",
        "40",
        "--temperature",
        "0",
        "--json",
    ]
    assert generate.main(words) == 0
    full = json.loads(capsys.readouterr().out)
    assert generate.main([*words, "--policy", "h2o", "--budget", "8", "--lossless", "--draft-tokens", "2"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["text"] == full["text"]
    assert (facts["policy"], facts["budget"], facts["allocated_slots"]) == ("h2o", 8, 16)
    assert 1 <= facts["tokens_per_round"] <= 3
    assert 0 < facts["draft_cache_bytes"] < full["cache_bytes"] < facts["cache_bytes"]
    assert generate.main([*words, "--policy", "h2o", "--budget", "8", "--lossless", "--refresh"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == full["text"]
    assert generate.main([*words, "--refresh"]) == 2
    assert "--refresh is of --lossless; give that, too." in capsys.readouterr().err
    assert generate.main([*words, "--draft-tokens", "2"]) == 2
    assert "--draft-tokens is of --lossless; give that, too." in capsys.readouterr().err


def test_the_commands_refuse_a_verifier_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "tiny", "--prompt", "Once upon a time", "-n", "8", "--policy", "h2o", "--budget", "8"]
    for wrong, message in (
        (["--verifier", "full+int8"], "--verifier is of --lossless; give that, too."),
        (["--lossless", "--verifier", "full+int7"], "'full+int7': there is no part 'int7'"),
        (
            ["--lossless", "--verifier", "tova"],
            "tova evicts tokens, which no roll-back brings back; verify under full.",
        ),
    ):
        assert generate.main([*words, *wrong]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("refresh", [slow(False), True])
def test_a_conversation_without_loss_is_that_of_the_full_cache(refresh: bool, tmp_path: Path) -> None:
    model = kvjax.load("tiny")
    settings: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.0, "seed": 5, "context": 200}
    full = Conversation(model, **settings)
    drafted = Conversation(model, policy="h2o", budget=16, lossless=True, refresh=refresh, **settings)
    for number, turn in enumerate(("The dog was big.", "Then a cat came.", "They went home.")):
        assert "".join(drafted.reply(turn)) == "".join(full.reply(turn))
        assert drafted.text == full.text
        if number == 1:
            drafted.save(tmp_path / "saved")
            drafted.forget()
            drafted.load(tmp_path / "saved")
    with pytest.raises(ValueError, match="a conversation of another model, policy or dtype"):
        Conversation(model, policy="tova", budget=16, lossless=True, **settings).load(tmp_path / "saved")
    with pytest.raises(ValueError, match="a conversation of another model, policy or dtype"):
        codes = kvjax.policy("full", codec="int8")
        Conversation(model, policy="h2o", budget=16, lossless=True, verifier=codes, **settings).load(tmp_path / "saved")
    with pytest.raises(ValueError, match="a conversation of another model, policy or dtype"):
        full.load(tmp_path / "saved")


def test_a_prompt_is_read_once_into_both_caches(x64: None) -> None:
    model = random_model(LOCAL, dtype=jnp.float64)
    for policy, plan in (("h2o", None), ("h2o", "adakv"), ("streaming", None)):
        draft, full = kvjax.decoder(model, policy, 17, plan=plan), kvjax.decoder(model, "full").replace(beyond_window=5)
        both, logits = kvjax.speculation(model, policy, 17, plan=plan).prefill(PROMPTS, max_new_tokens=30)
        for cache, reader in ((both.draft, draft), (both.full, full)):
            alone, expected = reader.prefill(PROMPTS, max_new_tokens=30)
            np.testing.assert_allclose(logits, expected, rtol=1e-9, atol=1e-9)
            for ours, theirs in zip(jax.tree.leaves(cache.memory), jax.tree.leaves(alone.memory), strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)
        programs = jax.tree.leaves(both)
        assert len({id(array) for array in programs}) == len(programs)


def test_compressing_a_full_cache_that_verifies_is_refused() -> None:
    speculation = kvjax.speculation(kvjax.load("tiny"), "streaming", 48)
    cache, _ = speculation.prefill(PROMPTS, max_new_tokens=8)
    state = kvjax.State(speculation.for_steps(), cache)
    with pytest.raises(ValueError, match="a state with a draft has a full cache, which has to stay"):
        kvjax.compress(state, "keydiff", 16)
    assert kvjax.cache_bytes(kvjax.compress(state.evicting, budget=16)) < kvjax.cache_bytes(state.evicting)


def test_questions_about_a_prompt_are_answered_without_loss() -> None:
    model, questions = kvjax.load("tiny"), [[5, 17], [8, 15, 42], [7]]
    settings: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0, "batch_size": 2}
    full = list(answer(model, PROMPTS[1], questions, **settings))
    drafted = list(answer(model, PROMPTS[1], questions, policy="tova", budget=16, lossless=True, **settings))
    assert [generation.tokens for generation in drafted] == [generation.tokens for generation in full]
