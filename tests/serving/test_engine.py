"""Serving: an answer is its request's alone, whoever else is there, and the engine outlives what goes wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import kvjax
from kvjax.cache.buffers import allocated_bytes
from kvjax.generation.generate import generate_ids
from kvjax.generation.sampling import Sampling
from kvjax.models.model import SamplingDefaults
from kvjax.serving import batch as serving
from kvjax.serving.engine import Engine
from kvjax.serving.prefix_cache import PrefixCache, prefix_keys
from kvjax.serving.requests import SNAPSHOT_BYTES, Finished, FullError, Held, Piece, Request, StoppingError
from tests.cases import slow
from tests.small_models import random_model, small_config

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ."
CONFIG = small_config(4, 2, eos=(0,), max_positions=128)
RNG = np.random.default_rng(5)
TEXT = tuple(RNG.integers(1, 64, 100).tolist())


class Letters:
    """A tokenizer each of whose tokens is a letter."""

    vocab_size = 64

    def decode(self, ids, skip_special_tokens=True):
        return "".join(LETTERS[i] for i in ids)


@functools.cache
def model():
    made = random_model(CONFIG, seed=3)
    made.tokenizer = Letters()
    return made


def engine(policy: Any = "h2o", **changes: Any) -> Engine:
    return Engine(model(), policy, **(dict[str, Any](budget=24, rows=3, chunk=16, steps=4, queue=32) | changes))


@pytest.fixture(scope="module")
def served():
    with engine() as made:
        made.warm_up()
        yield made


@dataclasses.dataclass
class Answer:
    text: str
    tokens: list[int]
    logprobs: list[Any]
    end: Finished

    @property
    def held(self) -> Held:
        assert self.end.held is not None
        return self.end.held


class Client:
    """Collects what is told of one request."""

    def __init__(self, served: Engine, request: Request, **changes: Any) -> None:
        self.news: queue.Queue[Piece | Finished] = queue.Queue()
        self.told: list[Piece] = []
        self.ticket = served.submit(dataclasses.replace(request, **changes), self.news.put)

    def first(self) -> Piece:
        """The first of what is told."""
        piece = self.news.get(timeout=60)
        assert isinstance(piece, Piece)
        self.told.append(piece)
        return piece

    def answer(self) -> Answer:
        """All of it."""
        while isinstance(news := self.news.get(timeout=60), Piece):
            self.told.append(news)
        tokens = [token for piece in self.told for token in piece.tokens]
        assert self.news.empty() and news.tokens == len(tokens)
        logprobs = [each for piece in self.told for each in piece.logprobs or ()]
        return Answer("".join(piece.text for piece in self.told), tokens, logprobs, news)


def ask(served: Engine, request: Request, **changes: Any) -> Answer:
    return Client(served, request, **changes).answer()


GREEDY = Request(TEXT[:40], max_tokens=12, sampling=Sampling(0.0), ignore_eos=True)
SEEDED = dataclasses.replace(GREEDY, sampling=Sampling(1.3, 30, 0.95, 0.02, 1.2), seed=2**32 - 7)


def crowd(bounded: bool) -> list[Request]:
    """Requests of all kinds, some of which begin alike."""
    made, rng = [], np.random.default_rng(6)
    for number in range(12):
        begins = TEXT[: [5, 16, 17, 40, 64][number % 5]]
        samplings = Sampling(0.0), Sampling(1.0), Sampling(1.5, top_k=9), Sampling(0.9, 50, 0.8, 0.05, 1.3)
        made.append(
            Request(
                (*begins, *rng.integers(1, 64, number).tolist()),
                max_tokens=1 + 5 * number % 17,
                sampling=samplings[number % 4],
                presence_penalty=0.5 * (number % 3),
                frequency_penalty=0.3 * (number % 2),
                seed=number,
                stop=("e",) if number % 4 == 3 else (),
                stop_ids=(3, 4) if number % 3 == 2 else (),
                budget=18 if bounded and number % 2 else None,
                logprobs=3 if number % 5 == 1 else None,
            )
        )
    return made


SETTINGS: dict[str, dict[str, Any]] = {
    "h2o": {"codec": "int8"},
    "streaming": {"positions": "cache"},
    "snapkv": {"recent": 8},
    "lightkv": {"context_limit": 48},
    "less": {"residual.kernels": "performer"},
    "keydiff": {"block": 8},
}


def policy_of(name: str) -> kvjax.Policy:
    return kvjax.policy("h2o") if name == "own" else kvjax.policy(name, **SETTINGS.get(name, {}))


def under(name: str, request: Any) -> contextlib.AbstractContextManager[Engine]:
    """The engine of all tests, or one under another policy."""
    return contextlib.nullcontext(request.getfixturevalue("served")) if name == "own" else engine(policy_of(name))


SLOW = ("random", "keyformer", "tova", "l2", *SETTINGS)


@pytest.mark.parametrize("policy", ["own", "full", *map(slow, SLOW)])
def test_answers_are_the_same_alone_and_under_load(policy: str, request) -> None:
    with under(policy, request) as served:
        requests = crowd(served.device.policy.plan.sizing.mode != "unbounded")
        alone = [ask(served, each) for each in requests]
        for _ in range(2):
            clients = {}
            for number in RNG.permutation(len(requests)).tolist():
                clients[number] = Client(served, requests[number])
                time.sleep(RNG.choice([0.0, 0.002, 0.01]))
            for number, client in clients.items():
                found, before = client.answer(), alone[number]
                assert (found.text, found.tokens, found.logprobs) == (before.text, before.tokens, before.logprobs)
                assert found.end.reason == before.end.reason
        assert len({tuple(each.tokens) for each in alone}) > 8


def without_budget(requests: list[Request]) -> list[Request]:
    return [dataclasses.replace(each, budget=None) for each in requests]


@pytest.fixture(scope="module")
def of_full() -> list[Answer]:
    """Answers of the full cache to the crowd."""
    with engine("full") as full:
        return [ask(full, each) for each in without_budget(crowd(True))]


KEEPING = [slow(name, False) for name in ("keyformer", "random", "lsh_e", "less", "keydiff")]


@pytest.mark.parametrize(("policy", "refresh"), [("streaming", False), ("keyformer", True), *KEEPING])
def test_lossless_answers_are_those_of_the_full_cache(policy: str, refresh: bool, of_full: list[Answer]) -> None:
    requests = crowd(True)  # their budgets are those of drafts
    with engine(policy_of(policy), lossless=True, draft_tokens=3, refresh=refresh, rows=2) as served:
        served.warm_up()
        before = served.numbers()["compilations"]
        for _ in range(2):
            clients = [Client(served, each) for each in requests]
            away = Client(served, GREEDY, max_tokens=80)
            away.ticket.cancel()
            for client, full in zip(clients, of_full, strict=True):
                answer = client.answer()
                assert (answer.text, answer.tokens) == (full.text, full.tokens)
                assert answer.end.reason == full.end.reason and answer.held.seen == full.held.seen
                assert answer.held.kept <= 24 and 1 <= answer.held.tokens_per_round <= 4
                for new, old in zip(answer.logprobs, full.logprobs, strict=True):
                    assert new.token == old.token and abs(new.logprob - old.logprob) < 1e-4
            assert away.answer().end.reason == "cancelled"
        numbers = served.numbers()
        assert numbers["compilations"] == before and numbers["reused_tokens_total"] > 0
        assert 0 < numbers["rounds_total"] < numbers["tokens_total"]


def test_a_verifier_in_8_bits_answers_as_a_cache_in_8_bits() -> None:
    codes = kvjax.policy("full", codec="int8")
    with engine(codes) as alone, engine(lossless=True, verifier=codes) as served:
        answers = [ask(each, GREEDY, max_tokens=30) for each in (alone, served)]
    assert answers[0].tokens == answers[1].tokens


def test_a_lossless_draft_of_the_whole_text_is_always_right() -> None:
    with engine(lossless=True, budget=128) as served:
        held = ask(served, GREEDY, max_tokens=20).held
    # The last round has room for one of five tokens less.
    assert held.tokens_per_round == 5.0 and held.bytes * served.device.rows == served.numbers()["cache_bytes"]


@pytest.mark.parametrize("policy", ["own", "lsh_e", *map(slow, ("full", "streaming", "less", "keydiff"))])
def test_answers_are_those_of_generate(policy: str, request) -> None:
    with under(policy, request) as served:
        for each in (GREEDY, SEEDED):
            settings: dict[str, Any] = dataclasses.asdict(each.sampling or Sampling()) | {
                "seed": each.seed,
                "stop_at_eos": False,
            }
            settings |= {"policy": policy_of(policy), "budget": 1.0 if policy == "full" else 24, "max_new_tokens": 12}
            own = settings["policy"].score.requires.prompt_chunk
            for prompt, chunk in ((TEXT[:16], own), (TEXT[:40], own or 16)):
                usual = generate_ids(served.model, [prompt], prefill_chunk=chunk, **settings)
                found = ask(served, each, prompt=prompt)
                assert found.tokens == usual.tokens[0]
                assert found.end.reason == "length" and found.text == Letters().decode(found.tokens)


def test_an_interruption_does_not_wait_for_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine() as own:
        compiled = threading.Event()
        monkeypatch.setattr(own.device, "_reading", lambda *_: compiled.wait(20))

        def interrupt(done: int, total: int) -> None:
            raise KeyboardInterrupt

        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            own.warm_up(interrupt)
        assert time.monotonic() - began < 10
        compiled.set()


def test_nothing_is_compiled_after_warm_up() -> None:
    with engine(chunk=24) as own:
        own.warm_up()
        before = own.numbers()["compilations"]
        assert before > 0
        clients = [Client(own, each) for each in crowd(True)]
        clients[4].ticket.cancel()
        ends = {client.answer().end.reason for client in clients}
        assert {"length", "stop"} <= ends <= {"length", "stop", "cancelled"}
        assert own.numbers()["compilations"] == before


def test_memory_is_what_it_was(served: Engine) -> None:
    for each in (GREEDY, SEEDED):
        held, rows = ask(served, each).held, served.device.state
        assert rows is not None
        assert served.numbers()["cache_bytes"] == allocated_bytes(rows.cache.memory) == served.device.rows * held.bytes
        assert held[:2] == (51, 24.0) and held.policy == "h2o"


@pytest.mark.parametrize("place", [0, 2])
def test_tokens_after_a_stop_string_are_not_counted(served: Engine, place: int) -> None:
    whole = ask(served, GREEDY, prompt=TEXT[:5])
    found = ask(served, GREEDY, prompt=TEXT[:5], stop=(whole.text[: place + 1],))
    assert found.tokens == whole.tokens[: place + 1]
    assert found.held[:2] == (5 + place + 1, 5 + place + 1)


def test_budgets_and_penalties(served: Engine) -> None:
    for budget in (24, 17):
        assert ask(served, GREEDY, budget=budget).held.kept == budget
    free, bound = (ask(served, GREEDY, frequency_penalty=penalty).tokens for penalty in (-2.0, 2.0))
    assert len(set(free)) < len(set(bound))
    # No token is as likely again, so none comes twice.
    once = ask(served, GREEDY, sampling=Sampling(0.0, repetition_penalty=1e9), max_tokens=10).tokens
    assert len(set(once)) == 10 and not set(once) & set(GREEDY.prompt)


def test_a_request_without_sampling_settings_has_the_models(served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"temperature": 1.3, "top_k": 30, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2}
    monkeypatch.setattr(served.model, "sampling_defaults", SamplingDefaults(own, "m"))
    assert ask(served, SEEDED, sampling=None).tokens == ask(served, SEEDED).tokens
    monkeypatch.setattr(served.model, "sampling_defaults", SamplingDefaults({"temperature": "hot"}, "m"))
    with pytest.raises(ValueError, match=r"^m: temperature is 'hot': give a number"):
        served.submit(dataclasses.replace(SEEDED, sampling=None), print)
    assert ask(served, SEEDED).end.error is None


def test_ends_of_texts(served: Engine) -> None:
    whole = ask(served, SEEDED)
    for place in range(1, 12):
        ids, before = (whole.tokens[place],), whole.tokens[: whole.tokens.index(whole.tokens[place])]
        by_id = ask(served, SEEDED, stop_ids=ids)
        assert (by_id.tokens, by_id.end.reason) == (before, "stop")
        word = whole.text[place - 1 : place + 1]
        by_word = ask(served, SEEDED, stop=(word,))
        assert by_word.text == whole.text[: whole.text.index(word)]
        # The word's own tokens are the last that are told.
        assert by_word.tokens == whole.tokens[: whole.text.index(word) + 2] and by_word.end.reason == "stop"


def test_logprobs(served: Engine) -> None:
    found = ask(served, GREEDY, logprobs=3)
    alone = ask(served, GREEDY, logprobs=0)
    assert found.tokens == alone.tokens == [each.token for each in found.logprobs]
    assert [each.logprob for each in found.logprobs] == [each.logprob for each in alone.logprobs]
    for most, none in zip(found.logprobs, alone.logprobs, strict=True):
        assert most.likeliest[0] == (most.token, most.logprob) and len(most.likeliest) == 3 and none.likeliest == ()
    text = jnp.asarray([[*GREEDY.prompt[:5], *ask(served, GREEDY, prompt=TEXT[:5]).tokens]])
    known = jax.nn.log_softmax(model().logits(text))[0, 4:-1]
    short = ask(served, GREEDY, prompt=TEXT[:5], logprobs=0)
    wanted = [float(known[place, each.token]) for place, each in enumerate(short.logprobs)]
    np.testing.assert_allclose([each.logprob for each in short.logprobs], wanted, atol=1e-4)


def test_rows_of_clients_that_go_away_are_free(served: Engine) -> None:
    endless = dataclasses.replace(GREEDY, max_tokens=80)
    clients = [Client(served, endless) for _ in range(6)]
    assert clients[0].first().tokens
    for client in clients:
        client.ticket.cancel()
        client.ticket.cancel()
    ends = [client.answer().end for client in clients]
    assert {end.reason for end in ends} == {"cancelled"} and ends[5].held is None
    assert served.numbers()["rows_busy"] == served.numbers()["waiting"] == 0


def test_queue_is_bounded_and_an_engine_stops() -> None:
    with engine(queue=2) as held:
        with held.changed:  # the engine takes nothing meanwhile
            first = [Client(held, GREEDY) for _ in range(2)]
            with pytest.raises(FullError, match="2 requests are waiting") as full:
                Client(held, GREEDY)
            assert full.value.retry_after >= 1
            with pytest.raises(RuntimeError, match="before the first request"):
                held.warm_up()
            for client in first:
                client.ticket.cancel()
        assert {client.answer().end.reason for client in first} == {"cancelled"}
        held.stop(0.0)
        with pytest.raises(StoppingError):
            Client(held, GREEDY)


def test_stop_gives_time_and_then_cancels() -> None:
    for grace, reason in ((60.0, "length"), (0.0, "cancelled")):
        served = engine()
        clients = [Client(served, GREEDY) for _ in range(4)]
        served.stop(grace)
        ends = [client.answer().end for client in clients]
        assert ends[-1].reason == reason
        with pytest.raises(StoppingError):
            Client(served, GREEDY)
        served.stop(0.0)


@pytest.mark.parametrize("program", ["generate", "insert", "read"])
def test_a_failing_dispatch_answers_and_the_engine_goes_on(served: Engine, program: str, monkeypatch) -> None:
    usual, before = ask(served, SEEDED), served.numbers()

    def broken(*_, **__):
        raise RuntimeError("out of luck.\nand more")

    with monkeypatch.context() as patch:
        patch.setattr(serving, program, broken)
        end = ask(served, GREEDY, max_tokens=80).end
    assert end.reason == "failed" and str(end.error).endswith("failed: RuntimeError: out of luck.")
    after = ask(served, SEEDED)
    assert (after.text, after.tokens) == (usual.text, usual.tokens)
    counted = served.numbers()["failed_dispatches_total"] - before["failed_dispatches_total"]
    # What a failed computation leaves behind is nobody's beginning.
    assert counted == (program != "read") and (after.end.reused == 0) == (program != "read")


def test_logits_that_are_no_numbers_end_their_row_alone(served: Engine, monkeypatch) -> None:
    reading, usual = serving.read, ask(served, SEEDED)

    def undefined(*given: Any) -> Any:
        text, logits = reading(*given)
        return text, np.full(logits.shape, np.nan, np.float32)

    other = Client(served, SEEDED, max_tokens=80)
    assert other.first().tokens
    with monkeypatch.context() as patch:
        patch.setattr(serving, "read", undefined)
        end = ask(served, SEEDED).end
    assert (end.reason, end.tokens) == ("failed", 0) and "NaN" in str(end.error)
    assert other.answer().end.reason == "length" and ask(served, SEEDED).tokens == usual.tokens


def test_a_text_that_cannot_be_made_ends_its_row_alone(served: Engine, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Letters, "decode", lambda *_, **__: 1 / 0)
        end = ask(served, GREEDY, max_tokens=60).end
    assert end.reason == "failed" and str(end.error).startswith("making text of tokens failed: ZeroDivisionError")
    assert ask(served, GREEDY).end.reason == "length" and served.numbers()["rows_busy"] == 0


def test_whoever_cannot_be_told_is_gone(served: Engine) -> None:
    def deaf(_):
        raise OSError("the line is dead")

    served.submit(dataclasses.replace(GREEDY, max_tokens=80), deaf)
    assert ask(served, GREEDY).end.reason == "length"
    assert served.numbers()["rows_busy"] == 0


def test_snapshots_save_reading_and_change_nothing(served: Engine) -> None:
    fresh = tuple(RNG.integers(1, 64, 50).tolist())
    first, again = (ask(served, SEEDED, prompt=fresh) for _ in range(2))
    other = ask(served, GREEDY, prompt=(*fresh[:33], 9, 9), seed=5, max_tokens=3)
    assert [each.end.reused for each in (first, again, other)] == [0, 48, 32]
    assert first.tokens == again.tokens
    assert ask(served, SEEDED, prompt=fresh, budget=20).end.reused == 0  # which holds others
    assert ask(served, SEEDED, prompt=fresh[:48]).end.reused == 32  # for its last token has to be read
    served.prefix_cache.clear()
    afresh = ask(served, GREEDY, prompt=(*fresh[:33], 9, 9), max_tokens=3)
    assert afresh.tokens == other.tokens and afresh.end.reused == 0
    assert 0 < served.numbers()["snapshot_bytes"] == served.prefix_cache.bytes <= SNAPSHOT_BYTES


def text_of(size: int) -> Any:
    return SimpleNamespace(cache=SimpleNamespace(memory=jnp.zeros(size, jnp.uint8)), token_mask=jnp.zeros(0, bool))


def test_snapshots_wanted_longest_ago_leave_first() -> None:
    held = PrefixCache(100)
    texts = [text_of(30) for _ in range(4)]
    for key, text in zip((b"a", b"ab", b"abc"), texts, strict=False):
        held.put(key, text)
    held.put(b"large", text_of(101))
    assert held.longest([b"a", b"ab", b"x"]) == (2, texts[1]) and held.longest([b"x"]) == (0, None)
    held.put(b"d", texts[3])
    assert held.bytes == held.device_bytes == 90 and len(held) == 3
    assert held.longest([b"abc"])[0] == held.longest([b"large"])[0] == 0
    held.put(b"e", text_of(60))
    # The shorter beginning stays longer than the one that goes on from it.
    assert (held.longest([b"a"])[0], held.longest([b"ab"])[0], held.bytes) == (0, 0, 90)
    assert held.device_bytes == 90
    assert not PrefixCache(0).put(b"a", text_of(1))


def test_keys_of_beginnings() -> None:
    keys = prefix_keys(b"x", TEXT[:49], 16)
    assert len(set(keys)) == 3 and keys[:2] == prefix_keys(b"x", TEXT[:48], 16)
    assert not set(keys) & set(prefix_keys(b"y", TEXT[:49], 16)) and prefix_keys(b"x", TEXT[:16], 16) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ()}, "empty"),
        ({"prompt": (64,)}, "token 64 is not in the vocabulary"),
        ({"max_tokens": 89}, "come to more than the 128"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"presence_penalty": 2.5}, "presence_penalty=2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty=nan"),
        ({"logprobs": 21}, "logprobs=21"),
        ({"budget": 25}, "budget=25 is more than the 24"),
        ({"budget": 0}, "budget=0"),
        ({"seed": -1}, "seed=-1"),
        ({"stop": ("",)}, "stop=''"),
        ({"stop_ids": (64,)}, "token 64"),
    ],
)
def test_requests_that_cannot_be_served(served: Engine, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Client(served, GREEDY, **changes)


def test_a_prefix_cache_may_be_larger_than_2_gib() -> None:
    with engine(snapshot_bytes=2**40) as made:
        assert made.prefix_cache.limit == 2**40


@struct.dataclass
class Neighbours(kvjax.Score):
    """Asks for what is known of a prompt that is read whole."""

    def init_slot(self, new, state):
        return jnp.zeros(new.k.shape[:3])

    def attention_stats(self, heads, new):
        return kvjax.LocalAttention()

    def update_slot(self, stats, view, new):
        return stats

    def score(self, view, new):
        return view.position.astype(jnp.float32)


@pytest.mark.parametrize(
    ("policy", "changes", "message"),
    [
        (kvjax.policy("h2o", plan="adakv"), {}, "a row's memory is not known"),
        ("keydiff", {"chunk": 16}, "evicts after each 128 tokens of a prompt, and chunk=16 .*; use 128"),
        (kvjax.policy("keydiff", block=10), {"chunk": 16}, "use 20"),
        (kvjax.policy("finch", delimiter=7), {}, "by the end of a prompt"),
        (kvjax.Policy(Neighbours()), {}, "read as a whole"),
        ("h2o", {"context": 129}, "context=129 does not fit the model's 128 positions"),
        ("h2o", {"chunk": 8}, "chunk=8"),
        ("h2o", {"budget": 0}, "budget=0"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_engines_that_cannot_be(policy: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(policy, **changes)


def test_an_engine_is_of_one_process() -> None:
    spread: Any = random_model(CONFIG)
    spread.tokenizer = Letters()
    spread.mesh = SimpleNamespace(shape={"rows": 1}, is_multi_process=True)
    with pytest.raises(ValueError, match="a mesh of one process"):
        Engine(spread)


def test_budget_means_nothing_where_nothing_leaves() -> None:
    with engine("full", context=64) as full:
        assert full.budget == full.context == 64
        with pytest.raises(ValueError, match="has no effect under policy full"):
            Client(full, GREEDY, budget=10)


def memory_of_a_dispatch(served: Engine) -> tuple[int, Any]:
    rows, how = served.device.state, dict[str, Any](served.device.writing)
    assert rows is not None
    kept = np.ones(served.device.rows, bool)
    program = serving.generate.lower(served.device.decoder, rows, kept, 4, False, **how)
    return allocated_bytes(rows.cache.memory), program.compile().memory_analysis()


@pytest.mark.compiled_well
def test_a_dispatch_changes_the_caches_in_place() -> None:
    with engine(budget=1024, context=128) as large:
        cache_bytes, memory = memory_of_a_dispatch(large)
    assert memory.alias_size_in_bytes >= cache_bytes > 4 * memory.temp_size_in_bytes


@pytest.mark.compiled_well
def test_a_lossless_dispatch_changes_the_full_cache_in_place() -> None:
    deep = random_model(dataclasses.replace(CONFIG, max_positions=4096), seed=3)
    deep.tokenizer = Letters()
    settings = dict[str, Any](budget=24, rows=2, chunk=16, steps=4, lossless=True)
    engines = [Engine(deep, context=context, **settings) for context in (2048, 4096)]
    (small, of_small), (large, of_large) = map(memory_of_a_dispatch, engines)
    assert of_large.alias_size_in_bytes >= large
    # Products of five queries with all keys grow; a copy of the cache would grow as much as the cache.
    growth = of_large.temp_size_in_bytes - of_small.temp_size_in_bytes
    assert growth < 0.8 * (large - small)
