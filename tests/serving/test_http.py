"""The HTTP server before a fake engine, asked as clients do over the loopback address."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.cli import serve
from kvjax.generation.sampling import Sampling
from kvjax.models.model import SamplingDefaults
from kvjax.serving.app import Server, Service, is_loopback
from kvjax.serving.engine import Engine
from kvjax.serving.openai.answer import Answer
from kvjax.serving.openai.bodies import ParsedBody
from kvjax.serving.openai.fields import CHAT, COMPLETION
from kvjax.serving.requests import Finished, Held, Request
from kvjax.utils.compilation import Compiling
from tests.fake_engine import FakeEngine, events, served
from tests.paths import ROOT

ENGINE = FakeEngine()
KV = {"seen": 6, "kept": 6, "bytes": 4096, "policy": "h2o", "tokens_per_round": 1.0}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(ENGINE, max_body=20_000) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def engine() -> FakeEngine:
    ENGINE.reset()
    return ENGINE


@pytest.fixture(scope="module")
def web(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=20) as made:
        yield made


def test_completions(client: openai.OpenAI, engine: FakeEngine) -> None:
    made = client.completions.create(model="letters", prompt="ab", max_tokens=4, seed=3)
    assert (made.choices[0].text, made.choices[0].finish_reason) == ("defg", "length")
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (2, 4, 6)
    assert made.model_extra == {"kv": KV}
    asked = engine.requests[0]
    assert (asked.prompt, asked.max_tokens, asked.sampling) == ((97, 98), 4, Sampling(1.0))
    assert client.completions.create(model="letters", prompt="ab", seed=0).choices[0].text == "abcdefghijklmnop"


def test_every_setting_reaches_the_engine(client: openai.OpenAI, engine: FakeEngine) -> None:
    more = dict(top_k=5, min_p=0.1, repetition_penalty=1.5, ignore_eos=True, stop_token_ids=[7], kv_budget=32)
    client.completions.create(
        model="letters",
        prompt=[1, 2],
        max_tokens=5,
        temperature=0,
        top_p=0.5,
        stop=["c"],
        presence_penalty=1,
        frequency_penalty=-1,
        logprobs=2,
        seed=-1,
        extra_body=more,
    )
    asked = engine.requests[0]
    assert asked.sampling == Sampling(0.0, 5, 0.5, 0.1, 1.5)
    assert (asked.presence_penalty, asked.frequency_penalty) == (1.0, -1.0)
    assert (asked.stop, asked.stop_ids, asked.ignore_eos, asked.budget) == (("c",), (7,), True, 32)
    assert (asked.logprobs, asked.seed, asked.prompt) == (2, 2**32 - 1, (1, 2))


def test_a_share_of_zero_is_that_of_the_likeliest_token(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.completions.create(model="letters", prompt="a", max_tokens=1, top_p=0)
    assert engine.requests[-1].sampling == Sampling(1.0, top_p=0)


def test_the_models_sampling_settings_are_those_of_requests_that_give_none(
    client: openai.OpenAI, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = SamplingDefaults({"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}, "m")
    monkeypatch.setattr(engine.model, "sampling_defaults", defaults)
    for more in ({}, {"temperature": 0.2, "top_p": 0.5, "top_k": -1, "repetition_penalty": None}):
        client.completions.create(model="letters", prompt="ab", max_tokens=1, extra_body=more)
    given, own = (request.sampling for request in engine.requests)
    assert given == Sampling(0.6, 20, repetition_penalty=1.1)
    assert own == Sampling(0.2, None, 0.5, None, 1.1)


def test_choices_of_several_prompts(client: openai.OpenAI, engine: FakeEngine) -> None:
    made = client.completions.create(model="letters", prompt=["ab", "c"], n=2, max_tokens=2, seed=0)
    assert [(each.index, each.text) for each in made.choices] == [(0, "ab"), (1, "bc"), (2, "ab"), (3, "bc")]
    assert made.usage is not None and (made.usage.prompt_tokens, made.usage.completion_tokens) == (3, 8)
    stream = client.completions.create(model="letters", prompt=[[9], [8, 7]], max_tokens=3, seed=1, stream=True)
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["bcd", "bcd"]


def test_stop_ends_a_text_before_it(client: openai.OpenAI, engine: FakeEngine) -> None:
    made = client.completions.create(model="letters", prompt="ab", seed=0, stop=["d"])
    assert (made.choices[0].text, made.choices[0].finish_reason) == ("abc", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client: openai.OpenAI, engine: FakeEngine, stream: bool) -> None:
    asked: dict[str, Any] = dict(model="letters", prompt="ab", seed=0, max_tokens=2, logprobs=2, stream=stream)
    made = client.completions.create(**asked)
    found = [chunk.choices[0].logprobs for chunk in made][:-1] if stream else [made.choices[0].logprobs]
    assert [token for part in found for token in part.tokens] == ["a", "b"]
    assert [offset for part in found for offset in part.text_offset] == [0, 1]
    assert [table for part in found for table in part.top_logprobs] == [{"a": -0.5, "b": -1.5}, {"b": -0.5, "c": -1.5}]
    talk: dict[str, Any] = dict(model="letters", messages=[{"role": "user", "content": "hi"}], seed=0, max_tokens=1)
    told: Any = client.chat.completions.create(**talk, logprobs=True, top_logprobs=1, stream=stream)
    logprobs = list(told)[1].choices[0].logprobs if stream else told.choices[0].logprobs
    (token,) = logprobs.content
    assert (token.token, token.logprob, token.bytes, token.top_logprobs[0].token) == ("a", -0.5, [97], "a")
    assert engine.requests[1].logprobs == 1


def test_a_chat(client: openai.OpenAI, engine: FakeEngine) -> None:
    turns: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]},
        {"role": "user", "content": "hi"},
    ]
    made = client.chat.completions.create(model="letters", messages=turns, max_completion_tokens=3, seed=7)
    assert (made.choices[0].message.content, made.choices[0].message.role) == ("hij", "assistant")
    assert bytes(engine.requests[0].prompt).decode() == "system: Be kind.\nuser: hi\n"
    turns += [made.choices[0].message, {"role": "user", "content": "ho"}]  # with all that an answer has, as clients do
    stream = client.chat.completions.create(
        model="letters", messages=turns, max_tokens=3, seed=7, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "hij"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 4 + ["length"]
    assert [chunk.usage is None for chunk in chunks] == [True] * 5 + [False]
    prompt = engine.requests[1].prompt
    assert bytes(prompt).decode().endswith("assistant: hij\nuser: ho\n")
    assert chunks[-2].model_extra == {"kv": KV | {"seen": len(prompt) + 3, "kept": len(prompt) + 3}}


def test_a_chat_goes_on_as_far_as_there_is_room(client: openai.OpenAI, engine: FakeEngine) -> None:
    turn: Any = {"role": "user", "content": "x" * 240}
    client.chat.completions.create(model="letters", messages=[turn])
    assert engine.requests[0].max_tokens == 256 - len("user: \n") - 240


def test_many_clients_at_once(address: str, engine: FakeEngine) -> None:
    engine.delay = 0.002

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:

            async def one(seed: int) -> str:
                asked: Any = dict(model="letters", prompt="ab", max_tokens=20, seed=seed)
                if seed % 2:
                    return (await client.completions.create(**asked)).choices[0].text
                stream = await client.completions.create(**asked, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return list(await asyncio.gather(*map(one, range(16))))

    texts = asyncio.run(all_of_them())
    assert texts == ["".join(chr(97 + (seed + i) % 26) for i in range(20)) for seed in range(16)]


def test_models(client: openai.OpenAI, web: httpx.Client) -> None:
    assert [each.id for each in client.models.list()] == ["letters"]
    assert client.models.retrieve("letters").model_extra == {
        "max_model_len": 256,
        "kv": {"policy": "h2o", "budget": 64},
    }
    with pytest.raises(openai.NotFoundError, match="there is no model 'other' here; ask for 'letters'"):
        client.models.retrieve("other")
    health = web.get("/health").json()
    assert (health["status"], health["model"], health["rows"], health["budget"]) == ("ok", "letters", 8, 64)


HI = [{"role": "user", "content": "hi"}]
BAD: list[tuple[dict[str, Any], int, str | None]] = [
    ({}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": ["a", 1]}, 400, "prompt"),
    ({"prompt": [1, 256]}, 400, "prompt"),
    ({"prompt": [True]}, 400, "prompt"),
    ({"prompt": {"a": 1}}, 400, "prompt"),
    ({"prompt": "\ud800"}, 400, "prompt"),
    ({"prompt": "x" * 256}, 400, "prompt"),
    ({"prompt": ["x"] * 129}, 400, "prompt"),
    ({"prompt": "a", "max_tokens": 256}, 400, "prompt"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": "7"}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": True}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**400}, 400, "max_tokens"),
    ({"prompt": "a", "model": "gpt-4"}, 404, "model"),
    ({"prompt": "a", "model": 7}, 400, "model"),
    ({"prompt": "a", "temperature": 2.5}, 400, "temperature"),
    ({"prompt": "a", "temperature": 10**400}, 400, "temperature"),
    ({"prompt": "a", "top_p": -0.1}, 400, "top_p"),
    ({"prompt": "a", "n": 129}, 400, "n"),
    ({"prompt": ["a", "b"], "n": 65}, 400, "n"),
    ({"prompt": "a", "stop": ""}, 400, "stop"),
    ({"prompt": "a", "stop": ["x"] * 17}, 400, "stop"),
    ({"prompt": "a", "stop": ["x" * 257]}, 400, "stop"),
    ({"prompt": "a", "seed": 0.5}, 400, "seed"),
    ({"prompt": "a", "stream": 1}, 400, "stream"),
    ({"prompt": "a", "stream_options": {"include_usage": 1}}, 400, "stream_options.include_usage"),
    ({"prompt": "a", "logprobs": 21}, 400, "logprobs"),
    ({"prompt": "a", "echo": True}, 400, "echo"),
    ({"prompt": "a", "suffix": "b"}, 400, "suffix"),
    ({"prompt": "a", "best_of": 3}, 400, "best_of"),
    ({"prompt": "a", "logit_bias": {"5": 1}}, 400, "logit_bias"),
    ({"prompt": "a", "stop_token_ids": [256]}, 400, "stop_token_ids"),
    ({"prompt": "a", "kv_budget": 65}, 400, "kv_budget"),
    ({"prompt": "a", "max_token": 5}, 400, "max_token"),
    ({"prompt": "a", "\ud800": 5}, 400, "\ud800"),
    ({"messages": None}, 400, "messages"),
    ({"messages": []}, 400, "messages"),
    ({"messages": ["hi"]}, 400, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages"),
    ({"messages": [{"role": "user"}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": "x", "name": 7}]}, 400, "messages"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, *HI]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "messages"),
    ({"messages": [*HI, {"role": "assistant", "content": "x"}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": "refused"}]}, 400, "messages"),
    ({"messages": HI, "tools": [{"type": "function"}]}, 400, "tools"),
    ({"messages": HI, "tools": [{"type": "function"}], "tool_choice": "auto"}, 400, "tools"),
    ({"messages": HI, "functions": [{"name": "f"}]}, 400, "functions"),
    ({"messages": HI, "tool_choice": "required"}, 400, "tool_choice"),
    ({"messages": HI, "verbosity": "high"}, 400, "verbosity"),
    ({"messages": HI, "reasoning_effort": "high"}, 400, "reasoning_effort"),
    ({"messages": HI, "min_tokens": 3}, 400, "min_tokens"),
    ({"messages": HI, "chat_template_kwargs": {"enable_thinking": True}}, 400, "chat_template_kwargs"),
    ({"messages": HI, "response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"messages": HI, "modalities": ["audio"]}, 400, "modalities"),
    ({"messages": HI, "top_logprobs": 2}, 400, "top_logprobs"),
    ({"messages": HI, "audio": {"voice": "x"}}, 400, "audio"),
]


def check_refusal(answer: httpx.Response, status: int, param: str | None = None) -> str:
    """The one sentence of a refusal in OpenAI's form."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["message"].endswith((".", "?")) and "\n" not in error["message"] and len(error["message"]) < 500
    assert "Traceback" not in answer.text
    return error["message"]


@pytest.mark.parametrize(("body", "status", "param"), BAD)
def test_bad_bodies(
    web: httpx.Client, engine: FakeEngine, body: dict[str, Any], status: int, param: str | None
) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = web.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    check_refusal(answer, status, param)
    assert engine.requests == []


@pytest.mark.parametrize(
    "extra",
    [
        dict(n=1, best_of=1, echo=False, logit_bias={}, user="me", suffix=None, logprobs=None, top_k=-1, min_p=0),
        dict(metadata={"a": "b"}, store=False, service_tier="auto", stream_options={"include_usage": True}),
    ],
)
def test_what_asks_for_nothing_is_let_through(web: httpx.Client, engine: FakeEngine, extra: dict[str, Any]) -> None:
    assert web.post("/v1/completions", json={"prompt": "a"} | extra).status_code == 200
    of_chats = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "parallel_tool_calls": True}
    shared = {name: value for name, value in extra.items() if name in CHAT}
    answer = web.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 1} | of_chats | shared)
    assert answer.status_code == 200, answer.text


def test_any_field_may_be_null(web: httpx.Client, engine: FakeEngine) -> None:
    for path, known, body in (
        ("/v1/completions", COMPLETION, {"prompt": "a"}),
        ("/v1/chat/completions", CHAT, {"messages": HI}),
    ):
        nothing = dict.fromkeys([*known, "of_a_later_client"])
        answer = web.post(path, json=nothing | {"max_tokens": 1} | body)
        assert answer.status_code == 200, answer.text


def test_what_clients_send_beside_the_question(client: openai.OpenAI, engine: FakeEngine) -> None:
    function: Any = {"name": "weather", "description": "tell it", "parameters": {"type": "object", "properties": {}}}
    first = client.chat.completions.create(model="letters", messages=HI, max_tokens=1, seed=0)  # type: ignore[arg-type]
    told = first.choices[0].message.model_dump() | {"reasoning_content": "I greet.", "name": "letters"}
    talk: Any = [{"role": "user", "content": "hi", "name": "Tom"}, told, {"role": "user", "content": "more"}]
    made = client.chat.completions.create(
        model="letters",
        messages=talk,
        max_tokens=1,
        n=1,
        tools=[{"type": "function", "function": function}],
        tool_choice="none",
        parallel_tool_calls=True,
        logit_bias={"5": 0},
        service_tier="flex",
        store=False,
        reasoning_effort="medium",
        verbosity="medium",
        prompt_cache_key="k",
        user="me",
        extra_body={"skip_special_tokens": True, "min_tokens": 0, "length_penalty": 1.0, "echo": False},
    )
    assert made.choices[0].finish_reason == "length"
    said = "user: hi\nassistant: a\nuser: more\n"
    assert bytes(engine.requests[-1].prompt).decode() == said
    last = client.completions.create(model="letters", prompt="a", max_tokens=1, best_of=1, echo=False, user="me")
    assert last.choices[0].finish_reason == "length"


@pytest.mark.parametrize(("held", "shown"), [(64.0, "64"), (23.999998, "24"), (40.33333206, "40.33")])
def test_kept_slots_are_as_a_reader_expects(held: float, shown: str) -> None:
    told = Answer(ENGINE, ParsedBody((Request((1,)),), 1, False, False, False)).finish(
        0, Finished("stop", 1, 1, 0, Held(70, held, 4096, "h2o", 1.0))
    )
    assert json.dumps(told["kv"]["kept"]) == shown


def test_pages_of_other_origins() -> None:
    origin, other = "https://example.org", "https://evil.example"
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    path = "/v1/completions"
    with served(FakeEngine(), origins=[origin], keys=["secret"]) as port, httpx.Client(timeout=20) as web:
        url = f"http://127.0.0.1:{port}{path}"
        allowed = web.options(url, headers={"origin": origin} | asked)
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == origin
        refused = web.options(url, headers={"origin": other} | asked)
        assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
        key = {"authorization": "Bearer secret"}
        answer = web.post(url, json={"prompt": "a", "max_tokens": 1}, headers={"origin": origin} | key)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == origin
        assert web.post(url, json={"prompt": "a"}, headers={"origin": origin}).status_code == 401


def test_no_other_page_may_ask_unless_said(web: httpx.Client) -> None:
    asked = {"origin": "https://example.org", "access-control-request-method": "POST"}
    assert web.options("/v1/completions", headers=asked).status_code == 405
    found = web.get("/health", headers={"origin": "https://example.org"})
    assert not any(name.startswith("access-control") for name in found.headers)


def test_each_request_is_a_line_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    with served(FakeEngine(), log=True) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as web:
        web.get("/health?secret=1")
        web.get("/a%0Ab")
        web.post("/v1/completions", json={"prompt": "abc", "n": 2, "max_tokens": 4})
        web.post("/v1/completions", json={"prompt": ""})
        list(web.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4, "stream": True}).iter_lines())
    logged = [line.split(" ", 2)[2].rsplit(" ", 2)[0] for line in capsys.readouterr().err.splitlines()]
    assert logged == [
        "GET /health 200",
        "GET /a%0Ab 404",
        "POST /v1/completions 200 3 tokens in, 8 out,",
        "POST /v1/completions 400",
        "POST /v1/completions 200 3 tokens in, 4 out,",
    ]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"a"', b'{"prompt": NaN}', b"\xff", b"[" * 9000, b"1" * 5000])
def test_bodies_that_are_no_objects(web: httpx.Client, body: bytes) -> None:
    said = check_refusal(web.post("/v1/completions", content=body, headers={"content-type": "application/json"}), 400)
    assert said.startswith("the body is ")


def test_what_is_no_request_for_a_text(web: httpx.Client, engine: FakeEngine) -> None:
    assert "Content-Type" in check_refusal(web.post("/v1/completions", data={"prompt": "a"}), 415)
    check_refusal(web.get("/nowhere"), 404)
    check_refusal(web.get("/v1/completions"), 405)
    check_refusal(web.get("/health", headers={"host": "evil.example"}), 403)
    assert web.get("/health", headers={"host": "localhost:80"}).status_code == 200
    check_refusal(web.get("/nowhere", headers={"host": "[::1"}), 404)
    template, engine.tokenizer.chat_template = engine.tokenizer.chat_template, None
    try:
        said = check_refusal(web.post("/v1/chat/completions", json={"messages": HI}), 400, "messages")
    finally:
        engine.tokenizer.chat_template = template
    assert said == "the model 'letters' has no chat template; ask /v1/completions."


def test_a_body_that_is_too_long(web: httpx.Client) -> None:
    kind = {"content-type": "application/json"}
    assert "20000 bytes" in check_refusal(web.post("/v1/completions", content=b" " * 20_001, headers=kind), 413)
    parts = (b" " * 5000 for _ in range(5))  # sent in chunks, without its length
    check_refusal(web.post("/v1/completions", content=parts, headers=kind), 413)


def test_requests_that_never_end_are_given_up() -> None:
    with (
        served(FakeEngine(), read_timeout=0.5) as port,
        socket.create_connection(("127.0.0.1", port), 10) as late_head,
    ):
        late_head.sendall(b"GET /health HTTP/1.1\r\nHost: ")
        with socket.create_connection(late_head.getpeername(), 10) as late_body:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            late_body.sendall(f"{head}Content-Length: 99\r\n\r\n{{".encode())
            assert late_body.recv(2000).startswith(b"HTTP/1.1 408")
        with pytest.raises(ConnectionResetError):
            assert late_head.recv(2000) == b""
            raise ConnectionResetError  # which of both it is, is up to the system


def test_a_full_queue(web: httpx.Client, engine: FakeEngine) -> None:
    engine.full, engine.places, engine.delay = 2.3, 2, 0.01
    answer = web.post("/v1/completions", json={"prompt": "a", "n": 3, "max_tokens": 250})
    assert "waiting already" in check_refusal(answer, 429)
    assert answer.headers["retry-after"] == "3"
    assert engine.ended(2) and {end.reason for end in engine.ends} == {"cancelled"}  # all choices or none


def test_what_the_engine_refuses(web: httpx.Client, engine: FakeEngine) -> None:
    engine.raises = ValueError("it cannot\n be served.")
    assert check_refusal(web.post("/v1/completions", json={"prompt": "a"}), 400) == "it cannot be served."


def test_a_fault_of_the_server_is_told_to_its_log_alone(
    web: httpx.Client, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.raises = KeyError("secret")
    answer = web.post("/v1/completions", json={"prompt": "a"})
    assert check_refusal(answer, 500) == "the server failed; its log says why."
    assert "secret" in caplog.text
    engine.reset()
    assert web.post("/v1/completions", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_dispatch_that_fails(web: httpx.Client, engine: FakeEngine, stream: bool) -> None:
    engine.fails_after = 0
    asked = {"prompt": "a", "n": 2, "stream": stream}
    assert check_refusal(web.post("/v1/completions", json=asked), 500) == "the dispatch failed."
    assert all(ticket.cancelled.is_set() for ticket in engine.tickets)
    engine.fails_after = 2
    answer = web.post("/v1/completions", json=asked | {"n": 1})
    if stream:
        told = [json.loads(data) for data in events(answer.iter_lines())]
        assert answer.status_code == 200 and len(told) == 3
        assert told[-1]["error"]["message"] == "the dispatch failed."
    else:
        check_refusal(answer, 500)
    engine.reset()
    assert web.post("/v1/completions", json=asked).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_row(address: str, engine: FakeEngine, stream: bool) -> None:
    engine.letters = threading.Semaphore(1)
    asked = {"prompt": "a", "max_tokens": 250, "stream": stream}
    with httpx.Client(base_url=address, timeout=httpx.Timeout(20, read=20 if stream else 0.2)) as client:
        if stream:
            with client.stream("POST", "/v1/completions", json=asked) as answer:
                assert next(events(answer.iter_lines()))
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=asked)
    assert engine.begun() and engine.ended(1)
    assert engine.ends[0].reason == "cancelled"


def test_a_slow_reader_is_cut_off() -> None:
    engine = FakeEngine()
    engine.wide, engine.delay = 2**20, 0.02
    with served(engine, write_timeout=0.5) as port, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", port))
        body = json.dumps({"prompt": "a", "max_tokens": 250, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        slow.recv(100)
        engine.wide = 1
        other = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a", "seed": 0}, timeout=20)
        assert other.json()["choices"][0]["text"] == "abcdefghijklmnop"
        assert engine.ended(2)
    assert [end.reason for end in engine.ends] == ["length", "cancelled"]


def test_metrics(web: httpx.Client, engine: FakeEngine) -> None:
    web.post("/v1/completions", json={"prompt": "a", "max_tokens": 5})
    assert engine.ended(1)  # a client may be told first
    answer = web.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    told = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    assert float(told["kvjax_cache_bytes"]) == 32768 and float(told["kvjax_tokens_total"]) == 5
    assert float(told["kvjax_time_to_first_token_seconds_count"]) >= 1
    assert float(told["kvjax_time_between_tokens_seconds_count"]) >= 4
    assert float(told['kvjax_http_responses_total{status="200"}']) >= 1


def test_keys() -> None:
    with (
        served(FakeEngine(), keys=["first", "sécond"]) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as web,
    ):
        for path in ("/v1/models", "/metrics"):
            answer = web.get(path)
            assert "no API key" in check_refusal(answer, 401)
            assert answer.headers["www-authenticate"] == "Bearer"
            for wrong in ("Bearer third", "Bearer", "Basic first", "Bearer f\u00ffrst"):
                check_refusal(web.get(path, headers=[(b"authorization", wrong.encode("latin-1"))]), 401)
            for right in ("first", "sécond"):
                shown = [(b"authorization", f"bearer {right}".encode())]
                assert web.get(path, headers=shown).status_code == 200
        check_refusal(web.post("/v1/completions", json={"prompt": "a"}), 401)
        assert web.get("/health").status_code == web.get("/").status_code == 200


def test_an_end_lets_what_runs_finish() -> None:
    engine = FakeEngine()
    engine.letters = threading.Semaphore(1)
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(Service(engine), grace=10)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as web:
        asked = {"prompt": "a", "max_tokens": 20, "stream": True, "seed": 0}
        with web.stream("POST", "/v1/completions", json=asked) as answer:
            lines = events(answer.iter_lines())
            told = [next(lines)]
            server.end()
            refused = web.post("/v1/completions", json={"prompt": "a"})
            assert "stopping" in check_refusal(refused, 503)
            assert web.get("/health").status_code == 503
            engine.letters.release(19)
            told += lines
    assert told[-1] == "[DONE]" and len(told) == 22
    thread.join(10)
    assert not thread.is_alive()


def test_what_outlasts_the_grace_is_told_so() -> None:
    engine = FakeEngine()
    engine.letters = threading.Semaphore(0)
    found: list[httpx.Response] = []
    with served(engine, grace=0.1) as port:

        def ask() -> None:
            found.append(httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a", "max_tokens": 250}))

        client = threading.Thread(target=ask, daemon=True)
        client.start()
        assert engine.begun()
    client.join(10)
    assert "stopping" in check_refusal(found[0], 503)


class _Engine(FakeEngine):
    """In place of the real one, with what the command line says of it."""

    def __init__(self, model: Any, **settings: Any) -> None:
        super().__init__()
        self.model, self.budget, self.settings, self.warm = model, settings["budget"], settings, False
        self.delay = 0.05
        MADE.append(self)

    def warm_up(self, told: Callable[[int, int], None]) -> None:
        told(0, 2)
        told(1, 2)
        told(2, 2)
        self.warm = True

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.stopped


MADE: list[_Engine] = []


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that loads no model."""
    monkeypatch.setattr("kvjax.model.load", lambda *_: FakeEngine().model)
    monkeypatch.setitem(sys.modules, "kvjax.serving.engine", SimpleNamespace(Engine=_Engine))  # type: ignore[arg-type]


@pytest.mark.usefixtures("faked")
def test_a_signal_ends_the_command_once_all_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    said: list[str] = []
    answers: list[httpx.Response] = []

    def ask() -> None:
        while not (found := re.search(r"ready at (\S+)", "".join(said))):
            said.append(capsys.readouterr().err)
            time.sleep(0.01)
        asked = {"prompt": "a", "max_tokens": 20, "seed": 0}
        with httpx.Client(base_url=found[1], headers={"authorization": "Bearer secret"}) as web:
            answers.append(web.get("/v1/models"))
            threading.Thread(target=end).start()
            answers.append(web.post("/v1/completions", json=asked))

    def end() -> None:
        if MADE[0].begun():
            os.kill(os.getpid(), signal.SIGTERM)

    client = threading.Thread(target=ask, daemon=True)
    client.start()
    words = [
        "--policy",
        "h2o+int8",
        "--budget",
        "32",
        "--rows",
        "3",
        "--port",
        "0",
        "--steps",
        "4",
        "--name",
        "ours",
        "--api-key-file",
    ]
    assert serve.main([*words, str(keys)]) == 0
    client.join(10)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["data"][0]["id"] == "ours"
    assert answers[1].json()["choices"][0]["text"] == "abcdefghijklmnopqrst"
    engine = MADE.pop()
    assert engine.warm and engine.settings["rows"] == 3 and engine.settings["steps"] == 4
    assert "context" not in engine.settings and engine.settings["policy"].codec.bits == 8
    *lines, models, completion = ("".join(said) + capsys.readouterr().err).splitlines()
    compiling = [f"compiling {done} of 2 programs{left}" for done, left in enumerate(("", ", 0 s left", ""))]
    assert lines[:4] == [f"kvjax serve: {line}" for line in ("loading tiny", *compiling)] and len(lines) == 5
    assert " GET /v1/models 200 " in models
    assert " POST /v1/completions 200 1 tokens in, 20 out, " in completion and completion.endswith(" s")


SLOW = """
import sys, threading, time, types
from kvjax.cli.main import main
from tests.fake_engine import FakeEngine

class Engine(FakeEngine):
    def __init__(self, model, **settings):
        super().__init__()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def warm_up(self, told):
        threading.Thread(target=time.sleep, args=[60]).start()  # as a compiler's
        told(0, 9)
        time.sleep(60)

import kvjax.model
kvjax.model.load = lambda *_: FakeEngine().model
sys.modules["kvjax.serving.engine"] = types.SimpleNamespace(Engine=Engine)
sys.argv = ["kvjax", "serve", "--port", "0"]
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_a_server_that_still_compiles(number: int, code: int) -> None:
    command = [sys.executable, "-c", SLOW]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert [process.stderr.readline() for _ in range(2)][1] == "kvjax serve: compiling 0 of 9 programs\n"
        process.send_signal(number)
        assert process.wait(10) == code
        assert process.stderr.read() == ""


def test_progress_tells_programs_that_are_read_from_those_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    compiling, said = Compiling(), []
    for programs, read in ((0, 0), (3, 3), (3, 4), (5, 4)):
        compiling.programs, compiling.read = programs, read
        serve._progress(compiling)(2, 4)
        said.append(capsys.readouterr().err)
    assert [re.sub(r"\d+ s", "1 s", line) for line in said] == [
        f"kvjax serve: {doing}, 1 s left\n"
        for doing in (
            "compiling 2 of 4 programs",
            *["reading 2 of 4 programs from disk"] * 2,
            "compiling 2 of 4 programs",
        )
    ]


def test_help_has_the_engines_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "engine's" not in text
    usual = {name: each.default for name, each in inspect.signature(Engine).parameters.items()}
    for name in ("chunk", "steps", "snapshot_bytes", "rows", "queue"):
        option = f"--{name.replace('_', '-')} {name.upper()} "
        assert f"(default: {usual[name]})" in text.rpartition(option)[2].partition(" --")[0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--host 0.0.0.0 --port 0", "0.0.0.0 is not a loopback address; give --api-key-file FILE, or --no-key"),
        ("--port 70000", "port=70000 is not a whole number from 0 to 65535."),
        ("--distributed", "requests reach only one of several processes"),
        ("--rows 0", "rows=0 is not a whole number from 1"),
        ("--chunk 4", "chunk=4 is not a whole number from 16"),
        ("--steps 0", "steps=0 is not a whole number from 1"),
        ("--context 1", "context=1 is not a whole number from 2"),
        ("--snapshot-bytes -1", "snapshot_bytes=-1 is not a whole number from 0"),
        ("--lossless --draft-tokens 0", "draft_tokens=0 is not a whole number from 1 to 16."),
        ("--draft-tokens 3", "--draft-tokens is of --lossless; give that, too."),
        ("--verifier full+int8", "--verifier is of --lossless; give that, too."),
        ("--grace nan", "grace=nan is not a number of seconds"),
        ("--policy nonsense", "there is no policy 'nonsense'"),
        ("--policy h20", "there is no policy 'h20'; did you mean h2o?"),
        ("--config h2o", "budget=0.05 of config h2o is no number of slots"),
        ("--host nowhere.invalid", "there is no address 'nowhere.invalid' to listen on"),
        ("--api-key-file /dev/null", "/dev/null is not a file"),
    ],
)
@pytest.mark.usefixtures("faked")
def test_what_the_command_refuses(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"kvjax serve: {sentence}")
    assert MADE == []


def test_a_port_that_is_taken_is_said_before_a_model_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve.main(["--port", str(port), "--model", "/nowhere"]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(serve, "NEEDS", ("uvicorn", "no_such_package"))
    assert serve.main([]) == 2
    said = "the server needs no_such_package; install it with pip install 'kvjax[serve]'."
    assert capsys.readouterr().err == f"kvjax serve: {said}\n"


@pytest.mark.parametrize(
    ("host", "is_it"),
    [("localhost", True), ("a.localhost.", True), ("127.8.0.1", True), ("[::1]", True), ("::1", True)]
    + [(host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.evil", "", "127.0.0.1.nip.io")],
)
def test_loopback(host: str, is_it: bool) -> None:
    assert is_loopback(host) is is_it


LEAVES = st.none() | st.booleans() | st.integers(-3, 300) | st.floats(allow_nan=False) | st.text(max_size=5)
JSON = st.recursive(
    LEAVES, lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=9), each, max_size=3)
)
SOUND = {"prompt": st.text(min_size=1, max_size=9), "messages": st.just(HI), "max_tokens": st.integers(1, 9)}


@given(st.data())
@settings(max_examples=40)
def test_no_body_breaks_the_server(web: httpx.Client, data: st.DataObject) -> None:
    known, path = (COMPLETION, "/v1/completions") if data.draw(st.booleans()) else (CHAT, "/v1/chat/completions")
    fields = data.draw(st.lists(st.sampled_from(sorted(known)), max_size=4, unique=True))
    body = {name: data.draw(each) for name, each in SOUND.items() if name in known}
    body |= {name: data.draw(JSON) for name in fields}
    answer = web.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404), (body, answer.text)
    if answer.status_code != 200:
        check_refusal(answer, answer.status_code, answer.json()["error"]["param"])


@given(st.binary(max_size=60))
@settings(max_examples=20)
def test_no_bytes_break_the_server(address: str, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 5) as client:
        client.sendall(sent + b"\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while part := client.recv(4096):
            answer += part
    assert b"Traceback" not in answer and b" 500 " not in answer
    if answer.startswith(b"HTTP/1.1 400"):
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"content-type: application/json" in head and f"content-length: {len(body)}".encode() in head
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\0\x01\0\r\n\r\n",  # TLS
        b"GET / HTTP/1.1\r\n\r\n",  # no host
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
        HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n",
        b"GET /" + b"a" * 100_000,  # more than the server keeps of a request that has not ended
    ],
)
def test_what_is_no_http_gets_an_error_as_all_others(address: str, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 5) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while part := client.recv(4096):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request") and b"connection: close" in head
    assert json.loads(body) == {
        "error": {
            "message": "the request is not valid HTTP/1.1; check its first line, headers and length.",
            "type": "invalid_request_error",
            "param": None,
            "code": None,
        }
    }


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(
    web: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("it was encoded")

    monkeypatch.setattr(engine.tokenizer, "encode", encode)
    text = "a" * engine.context
    for path, param, asked in (
        ("/v1/completions", "prompt", text),
        ("/v1/completions", "prompt", ["a" * 300, text]),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": text}]),
    ):
        answer = web.post(path, json={param: asked})
        said = check_refusal(answer, 400, param)
        assert re.fullmatch(
            r"a prompt of at least \d+ tokens \(\d+ characters\) does not fit the context of 256; .*", said
        )
        assert answer.json()["error"]["code"] == "context_length_exceeded"
