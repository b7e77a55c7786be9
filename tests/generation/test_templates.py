"""Chat templates: what they read and write, their limits, and their settings."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvjax
from kvjax import generate
from kvjax.cli import chat as chat_command
from kvjax.generation import templates
from kvjax.generation.chat import Conversation
from kvjax.generation.prompts import encode, end_ids, render
from kvjax.generation.questions import encode_questions
from kvjax.generation.templates import Renderer, TemplateError
from kvjax.serving.openai import bodies
from kvjax.serving.openai.fields import APIError
from tests import tokenizing
from tests.small_models import random_model, small_config
from tests.templates import BOTH, PARTS, SYSTEM_TEXT, TEXT, model_with

TURNS = [
    {"role": "system", "content": "Be kind.\n"},
    {"role": "user", "content": "  Who is 'Tom' <b> & \"Ann\"? "},
    {"role": "assistant", "content": "<think>\nHe is a child.\n</think>\n\nHe is Ann's friend."},
    {"role": "user", "content": "Ich weiß\u2028das nicht."},
]


def in_parts(turns: list[dict[str, Any]], *roles: str) -> list[dict[str, Any]]:
    return [
        turn | {"content": [{"type": "text", "text": turn["content"]}]} if turn["role"] in roles else turn
        for turn in turns
    ]


ALL = ("system", "user", "assistant")


@pytest.mark.parametrize("name", [*TEXT, *PARTS, *BOTH])
def test_texts_are_those_of_transformers(name: str) -> None:
    model = model_with((TEXT | PARTS | BOTH)[name])
    read = in_parts(TURNS, *ALL) if name in PARTS else TURNS
    for count in (2, 4):
        for answers in (True, False):
            wanted = model.tokenizer.apply_chat_template(
                read[:count], tokenize=False, add_generation_prompt=answers, continue_final_message=False
            )
            assert render(model, TURNS[:count], answers) == wanted
            assert render(model, in_parts(TURNS[:count], "user"), answers) == wanted
            assert render(model, in_parts(TURNS[:count], *ALL), answers) == wanted
        if name != "json":
            wanted = model.tokenizer.apply_chat_template(read[:count], tokenize=False, continue_final_message=True)
            assert render(model, TURNS[:count], add_generation_prompt=False, unfinished=True) == wanted
    text = render(model, TURNS)
    assert "friend" in text and "kind" in text and ("child" in text) == (name != "thoughts")
    several = [{"role": "user", "content": [{"type": "text", "text": each} for each in ("one", "two")]}]
    if name not in TEXT:
        assert render(model, several) == model.tokenizer.apply_chat_template(
            several, tokenize=False, add_generation_prompt=True
        )
    elif name != "json":
        assert "onetwo" in render(model, several)


def test_a_system_turn_may_be_a_text_where_others_are_parts() -> None:
    for turns in (TURNS, in_parts(TURNS, *ALL), in_parts(TURNS, "system")):
        assert render(model_with(SYSTEM_TEXT), turns).startswith("Be kind.\n\nuser:   Who is 'Tom' <b>")
    empty = [TURNS[1], {"role": "assistant", "content": ""}, {"role": "user", "content": " "}]
    for template in (TEXT | PARTS | BOTH).values():
        assert "Tom" in render(model_with(template), empty)


@pytest.mark.parametrize(
    ("template", "turn"),
    [
        ("USER: ASSISTANT:", "1 (system)"),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", "1 (system)"),
        ("{{ messages[-1].content }}", "1 (system)"),
        ("{% for m in messages %}{{ m.content[:15] }}{% endfor %}", "2 (user)"),
        ("{% for m in messages %}{{ m.content[-15:] }}{% endfor %}", "2 (user)"),
        ("{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}", "3 (assistant)"),
        (PARTS["llava"].replace("part.text", "part.txt"), "1 (system)"),
    ],
)
def test_a_text_that_lacks_a_turn_is_refused(template: str, turn: str) -> None:
    for turns in (TURNS, in_parts(TURNS, *ALL)):
        with pytest.raises(ValueError) as raised:
            render(model_with(template), turns)
        sentence = f"the chat template of 'small' leaves out the text of turn {turn}; ask without that turn."
        assert str(raised.value) == sentence


def test_a_template_that_refuses_probes_is_looked_at_by_its_text() -> None:
    strict = "{% for m in messages if 'Tom' not in m.content %}{{ raise_exception('no Tom') }}{% endfor %}TEXT"
    turns = [{"role": "user", "content": "Tom and Ann"}]
    assert render(model_with(strict.replace("TEXT", "{{ messages[0].content }}")), turns) == "Tom and Ann"
    with pytest.raises(ValueError, match=r"leaves out the text of turn 1 \(user\)"):
        render(model_with(strict), turns)
    with pytest.raises(ValueError, match=r"^the chat template of 'small' refuses the prompt: no Tom\.$"):
        render(model_with(strict), TURNS)


def vision(end: int) -> kvjax.Model:
    """A model whose template reads parts and whose turns begin and end with special tokens."""
    model = random_model(small_config(4, 2, eos=(0,), max_positions=128), seed=3)
    template = (
        "{% for m in messages %}{{ 'w2 ' if m.role == 'user' else 'w3 ' }}"
        "{% for part in m.content %}{{ part['text'] }}{% endfor %}{{ ' wEND ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'w3 ' }}{% endif %}"
    )
    model.tokenizer = tokenizing.words(special=(2, end), chat_template=template.replace("END", str(end)))
    return model


def test_a_template_of_parts_gets_the_texts_everywhere(tmp_path: Path) -> None:
    model, turns = vision(9), [{"role": "user", "content": "w20 w21"}]
    ids = [2, 20, 21, 9, 3]
    assert encode(model, "w20 w21", chat=True) == encode(model, turns) == encode(model, in_parts(turns, "user")) == ids
    assert end_ids(model, chat=True) == (0, 9)
    before, (question,) = encode_questions(model, turns, ["w22"])
    assert before + question == [2, 20, 21, 9, 2, 22, 9, 3]
    serving: Any = SimpleNamespace(model=model, context=128, budget=64)
    for each in (turns, in_parts(turns, "user")):
        assert list(bodies.chat(serving, {"messages": each}, 16).requests[0].prompt) == ids
    settings: dict[str, Any] = dict(max_new_tokens=3, temperature=0.0)
    assert model.generate("w20 w21", chat=True, **settings) == model.generate(
        in_parts(turns, "user"), chat=True, **settings
    )
    talk = Conversation(model)
    assert (talk._first, talk._between) == (("w2 ", " w9 w3 "), (" w9 w2 ", " w9 w3 "))
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(in_parts(turns, "user")))
    options = generate.parser().parse_args(["--messages", str(file)])
    assert encode(model, generate.prompt_of(options)) == ids


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image_url", "image_url": {"url": "a"}}], "message 1 has a part of type 'image_url'"),
        ([{"type": "text", "text": "a"}, {"type": "input_audio"}], "message 1 has a part of type 'input_audio'"),
        ([{"type": "text", "text": 5}], "message 1 has the part {'type': 'text', 'text': 5}"),
        ([{"type": "text", "text": "a", "size": 1}], "message 1 has the part"),
        (["a"], "message 1 has the part 'a'"),
        ([{}], "message 1 has a part of type None"),
        (None, "message 1 is {'role': 'user', 'content': None}"),
        ({"type": "text", "text": "a"}, "message 1 is"),
    ],
)
def test_parts_that_are_no_texts_are_refused_by_name(content: Any, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        kvjax.load("tiny").generate([{"role": "user", "content": content}], chat=True)
    assert str(raised.value).startswith(message)


LIMITS = [
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "seconds"),
    ("{% for i in range(99999) %}{% for j in range(99999) %}a{% endfor %}{% endfor %}", "more than"),
    ("{% set c = cycler(1, 2) %}{% for i in range(99999) %}{% for j in range(99999) %}{{ c.next() and '' }}{% endfor %}"
     "{% endfor %}", "seconds"),
    ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}", "seconds"),
    ("{{ lipsum(n=10**9) }}", "seconds"),
    ("{{ (10**9) ** (10**6) }}", "seconds"),
    ("{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}"
     "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}", "seconds"),
    ("{{ 'a' * 1000000000 }}", "MB of memory"),
    ("{{ '%1000000000d' % 1 }}", "MB of memory"),
    ("{{ '{:>1000000000}'.format(1) }}", "MB of memory"),
    ("{{ 'a' | center(10**9) }}", "MB of memory"),
    ("{{ [1] | tojson(indent=10**9) }}", "MB of memory"),
    ("{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}", "MB of memory"),
    ("{% set ns = namespace(a='a') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}", "more than"),
    ("{{ 'a' * 10000000 }}", "writes more than 8,388,608 characters"),
    ("{{ range(10**12) | list }}", "refuses the prompt: Range too big"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself too deeply"),
    ("{{ " + "(" * 10000 + "1" + ")" * 10000 + " }}", "calls itself too deeply"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{{ raise_exception('a ' * 10000) }}", "refuses the prompt: a a a"),
    ("{% for", "line 1: "),
]  # fmt: skip


@pytest.fixture(scope="module")
def hasty() -> Iterator[Renderer]:
    """A renderer whose templates have a fifth of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(templates, "SECONDS", 0.2)
        made = Renderer()
        with contextlib.suppress(TemplateError):
            made.render("{% for", {})  # starts the process
        yield made


@pytest.mark.parametrize(("template", "message"), LIMITS)
def test_a_template_ends_soon_whatever_it_does(template: str, message: str, hasty: Renderer) -> None:
    begin = time.process_time()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TemplateError) as raised:
        patch.setattr(templates, "SECONDS", 0.2)
        hasty.render(template, {})
    said = str(raised.value)
    assert message in said and len(said) < 400 and "\n" not in said
    assert time.process_time() - begin < 0.5  # the work is another process's
    assert hasty.render("{{ a }}", {"a": "go on"}) == "go on"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked on POSIX alone")
def test_a_process_that_ends_is_started_again() -> None:
    renderer = Renderer()
    assert renderer.render("{{ a }}", {"a": "\ud800\u2028é"}) == "\ud800\u2028é"
    process: Any = renderer._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert renderer.names("{{ a }}{% set b = 1 %}{{ b }}{{ raise_exception }}") == ["a"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(templates, "WALL_SECONDS", 0.1)
        loops = "{% for i in range(99999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
        with pytest.raises(TemplateError, match="takes more than"):
            renderer.render(loops, {})
    process = renderer._process
    assert process.stdin.closed and process.returncode == -signal.SIGKILL
    del renderer
    assert process.returncode is not None


def test_a_limit_is_one_sentence_that_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "endless"
    shutil.copytree(str(kvjax.load("tiny").directory), place)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        template = "{{ 'a' * 1000000000 }}"
        if name.endswith("json"):
            config = json.loads((place / name).read_text())
            (place / name).write_text(json.dumps(config | {"chat_template": template}))
        else:
            (place / name).write_text(template)
        said = f"the chat template of '{place}' ({name}) takes more than 512 MB of memory; use another template."
        model = kvjax.load(place)
        with pytest.raises(ValueError) as raised:
            model.generate("Hi", chat=True)
        assert str(raised.value) == said
        serving: Any = SimpleNamespace(model=model, context=128, budget=64)
        with pytest.raises(APIError) as refused:
            bodies.chat(serving, {"messages": [{"role": "user", "content": "Hi"}]}, 16)
        assert refused.value.message == said and refused.value.status == 400
        for command in (generate, chat_command):
            words = ["--prompt", "Hi", "--chat"] if command is generate else []
            assert command.main(["--model", str(place), *words]) == 2
            err = capsys.readouterr().err
            assert err.endswith(f"{said}\n") and err.count("\n") == 1


QUIET = {"enable_thinking": False}


def thinking() -> kvjax.Model:
    tiny = kvjax.load("tiny")
    model = kvjax.Model(tiny.weights, tiny.config, "tiny", tiny.directory)
    model.tokenizer.chat_template = TEXT["thoughts"]
    return model


def test_settings_reach_the_template(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model, turns = thinking(), [{"role": "user", "content": "Hi"}]
    text = model.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **QUIET)
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    assert text.endswith("</think>\n\n") and encode(model, "Hi", QUIET) == encode(model, turns, QUIET) == ids
    assert encode(model, "Hi", {}) == encode(model, "Hi", True) == encode(model, "Hi", {"enable_thinking": True})
    serving: Any = SimpleNamespace(model=model, context=128, budget=64)
    body = {"messages": turns, "chat_template_kwargs": QUIET}
    assert list(bodies.chat(serving, body, 16).requests[0].prompt) == ids
    before, (question,) = encode_questions(model, turns, ["Who?"], QUIET)
    assert before + question == encode(model, [*turns, {"role": "user", "content": "Who?"}], QUIET)
    settings: dict[str, Any] = dict(policy="full", max_new_tokens=2, temperature=0.0)
    (answer,) = model.generate("Hi", chat=QUIET, **settings)
    assert answer == "".join(model.stream(turns, chat=QUIET, **settings))
    monkeypatch.setattr("kvjax.model.load", lambda *_, **__: model)
    words = ["--max-new-tokens", "2", "--temperature", "0", "--template-setting", "enable_thinking=false"]
    assert generate.main(["--prompt", "Hi", "--json", *words]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["text"], facts["prompt_tokens"]) == (answer, len(ids))


def test_a_conversation_without_thoughts_goes_on() -> None:
    head, empty = "<|im_start|>assistant\n", "<think>\n\n</think>\n\n"
    for chat, thoughts in ((QUIET, empty), (None, "")):
        talk = Conversation(thinking(), chat=chat)
        after = f"<|im_end|>\n{head}{thoughts}"
        assert talk._first == ("<|im_start|>user\n", after)
        assert talk._between == ("<|im_end|>\n<|im_start|>user\n", after)


def test_settings_that_change_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    model = thinking()
    serving: Any = SimpleNamespace(model=model, context=128, budget=64)
    unknown = (
        "the chat template of 'tiny' (tokenizer_config.json) has no setting 'enable_thinkin'; it has enable_thinking."
    )
    for chat, message in (
        ({"enable_thinkin": False}, unknown),
        ({"messages": []}, "'messages' is no setting of a chat template; leave it out."),
        ({"enable_thinking": {1}}, "the template setting enable_thinking={1} is no value of JSON."),
    ):
        with pytest.raises(ValueError) as raised:
            model.generate("Hi", chat=chat)
        assert str(raised.value) == message
    with pytest.raises(TypeError, match="chat='yes' is neither True, False nor settings"):
        untyped: Any = "yes"
        model.generate("Hi", chat=untyped)
    with pytest.raises(ValueError, match="has no setting 'enable_thinkin'"):
        Conversation(model, chat={"enable_thinkin": False})
    turns = [{"role": "user", "content": "Hi"}]
    for kwargs, message in (
        ({"enable_thinkin": False}, unknown),
        ({"tools": []}, "chat_template_kwargs.tools is not supported; leave it out."),
        ([], "chat_template_kwargs=[] is not an object."),
    ):
        with pytest.raises(APIError) as refused:
            bodies.chat(serving, {"messages": turns, "chat_template_kwargs": kwargs}, 16)
        assert refused.value.message == message
    for words, message in (
        (["enable_thinking"], "is not of the form key=value"),
        (["speed=2"], "has no setting 'speed'"),
    ):
        assert generate.main(["--prompt", "Hi", "--template-setting", *words]) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1
