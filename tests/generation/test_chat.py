"""Conversations on a cache that never grows, from Python and from the command line."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from kvjax.cli import chat
from kvjax.generation import saved_chat
from kvjax.generation.chat import Conversation
from tests.compiling import fast_environment
from tests.paths import DATA, ROOT

SMALL: dict[str, Any] = dict(policy="h2o", budget=16, max_new_tokens=20, temperature=0.0)
WORDS = ["--budget", "16", "--max-new-tokens", "20", "--temperature", "0"]
TURNS = ("My name is Tom. I like red balls.", "What is my name?")


@pytest.fixture(scope="module")
def model() -> kvjax.Model:
    return kvjax.load("tiny")


def test_answers_are_those_to_all_of_the_text(model: kvjax.Model) -> None:
    talk = Conversation(model, policy="full", max_new_tokens=20, temperature=0.0, context=96)
    written: list[range] = []
    text = ""
    for turn in TURNS:
        answer = "".join(talk.reply(turn))
        text = model.tokenizer.decode(talk.text)
        assert text.endswith(f"<|user|>\n{turn}<|assistant|>\n{answer}")
        ids = model.tokenizer.encode(text[: len(text) - len(answer)], add_special_tokens=False)
        written.append(range(len(ids), len(talk.text)))
    assert f"<|endoftext|><|user|>\n{TURNS[1]}" in text
    best = np.asarray(model.logits([talk.text])[0].argmax(-1))
    for places in written:
        assert len(places) > 3 and [talk.text[place] for place in places] == [best[place - 1] for place in places]
    with pytest.raises(ValueError, match="leaves no room for an answer in the 96 that are planned; begin a new one"):
        "".join(talk.reply("red " * 40))


def test_a_conversation_is_kept_and_never_grows(model: kvjax.Model, tmp_path: Path) -> None:
    talk = Conversation(model, **SMALL)
    "".join(talk.reply(TURNS[0]))
    first = talk.use()
    kept = tmp_path / "kept"
    for _ in range(2):  # in place of itself
        talk.save(kept)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    answer = "".join(talk.reply(TURNS[1]))
    second = talk.use()
    assert second.tokens > first.tokens > 16 and second.bytes == first.bytes
    assert first.slots == second.slots == second.limit == 16
    again = Conversation(model, **SMALL)
    again.load(kept)
    assert again.use() == first
    assert "".join(again.reply(TURNS[1])) == answer and again.text == talk.text
    talk.forget()
    assert talk.text == [] and "".join(talk.reply(TURNS[0]))
    changed: dict[str, Any] = SMALL | {"policy": kvjax.policy("h2o", sinks=2)}
    other = Conversation(model, **changed)
    for directory, message in ((kept, "of another model, policy or dtype"), (tmp_path, "has no saved conversation")):
        with pytest.raises(ValueError, match=message):
            other.load(directory)
    with pytest.raises(ValueError, match="is not a saved conversation"):
        talk.save(tmp_path)


def test_a_conversation_is_read_again_when_it_outgrows_the_original_context(model: kvjax.Model, tmp_path: Path) -> None:
    assert model.config.rope is not None
    pairs = model.config.rope.width // 2
    rope = dataclasses.replace(
        model.config.rope,
        scaling="longrope",
        original_max_positions=64,
        short_factors=(1.0,) * pairs,
        long_factors=(4.0,) * pairs,
    )
    longer = kvjax.Model(model.weights, dataclasses.replace(model.config, rope=rope), model.name, model.directory)
    settings: dict[str, Any] = dict(policy="full", max_new_tokens=20, temperature=0.0, context=160, stop_at_eos=False)
    talk = Conversation(longer, **settings)
    "".join(talk.reply("My name is Tom."))
    first = list(talk.text)
    assert 20 < len(first) <= 64
    talk.save(tmp_path / "kept")
    talk = Conversation(longer, **settings)
    talk.load(tmp_path / "kept")
    "".join(talk.reply("I like red balls. " * 4))
    "".join(talk.reply("And you?"))
    assert len(talk.text) > 100 and talk.text[: len(first)] == first
    for text in (first, talk.text):
        best = np.asarray(longer.logits([text])[0].argmax(-1))
        assert text[-20:] == best[-21:-1].tolist()


@pytest.mark.parametrize(
    ("policy", "answer"),
    [("h2o", "ing! \nThe little girl was"), ("lsh_e", "ing the other side of the other side")],
)
def test_conversations_of_0_2_0_go_on_as_they_did_there(policy: str, answer: str) -> None:
    talk = Conversation(kvjax.load("tiny"), policy=policy, budget=24, context=96, max_new_tokens=8, temperature=0.0)
    with pytest.warns(UserWarning, match="saved by an older kvjax"):
        talk.load(DATA / "conversation_0.2.0" / policy)
    assert "".join(talk.reply("The end? No,")) == answer
    other = Conversation(kvjax.load("tiny"), policy="snapkv", budget=40, context=96, max_new_tokens=8)
    with pytest.warns(UserWarning, match="older"), pytest.raises(ValueError, match="another model, policy or dtype"):
        other.load(DATA / "conversation_0.2.0" / policy)


def test_an_answer_that_is_left_stays_as_far_as_it_came(model: kvjax.Model) -> None:
    talk, whole = Conversation(model, **SMALL), Conversation(model, **SMALL)
    pieces = list(whole.reply(TURNS[0]))
    for number, _ in enumerate(talk.reply(TURNS[0]), 1):
        if number == 3:
            break
    assert talk.text == whole.text[: len(talk.text)] and len(talk.text) < len(whole.text)
    assert len(pieces) > 4 and "".join(talk.reply(TURNS[1]))
    wanted = f"{''.join(pieces[:3])}<|endoftext|><|user|>\n{TURNS[1]}<|assistant|>\n"
    assert wanted in model.tokenizer.decode(talk.text)


def test_what_cannot_be_talked_with_is_refused(model: kvjax.Model) -> None:
    def templated(template: str | None) -> kvjax.Model:
        other = kvjax.Model(model.weights, model.config, model.name, model.directory)
        other.tokenizer.chat_template = template
        return other

    with pytest.raises(ValueError, match="writes earlier turns differently when another one follows"):
        Conversation(
            templated("{% for m in messages %}{{ m['content'] if loop.last else m['content'] ~ '!' }}{% endfor %}")
        )
    with pytest.raises(ValueError, match="has no chat template, so no system's turn"):
        Conversation(templated(None), system="Be kind.")
    short: dict[str, Any] = SMALL | {"max_new_tokens": 2}
    plain = Conversation(templated(None), **short)
    "".join(plain.reply("Once upon"))
    assert plain.text[:2] == model.tokenizer.encode("Once upon")
    with pytest.raises(TypeError, match="Conversation has no keyword 'num_samples'"):
        Conversation(model, num_samples=2)  # pyright: ignore[reportCallIssue]
    talk = Conversation(model, **SMALL)
    for turn, message in ((" ", "the turn is empty"), ("a\ud800", "not valid text"), ("a " * 1200, "leaves no room")):
        with pytest.raises(ValueError, match=message):
            "".join(talk.reply(turn))
    with pytest.raises(ValueError, match="the conversation has no turn yet"):
        talk.use()


def test_an_interruption_stops_the_answer_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    reply: Callable[..., Any] = Conversation.reply

    def interrupted(self: Conversation, turn: str) -> Any:
        for piece in reply(self, turn):
            said.append(piece)
            if len(said) == 2:
                signal.raise_signal(signal.SIGINT)
            yield piece

    monkeypatch.setattr(Conversation, "reply", interrupted)
    lines = [TURNS[0], "", "/help", TURNS[1], "/quit", "never read"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert chat.main(WORDS) == 0
    out, err = capsys.readouterr()
    assert out.startswith("".join(said[:2]) + "\n") and out.count("\n") >= 2
    assert err.count("(stopped)") == 1 and err.count("slots per head hold one") == 2 and "/save NAME" in err


class Terminal(io.StringIO):
    """Lines that somebody types."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_conversation_in_a_terminal_outlives_commands(
    interrupted: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def save(self: Conversation, directory: Path) -> None:
        if not interrupted:
            raise PermissionError(f"{directory} cannot be written")
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Conversation, "save", save)
    monkeypatch.setattr("sys.stdin", Terminal("/save kept\n/help\n/quit now\n"))
    assert chat.main(WORDS) == 0
    said = capsys.readouterr().err
    assert "/save NAME" in said and ("cannot be written" in said) != interrupted


@pytest.mark.parametrize(
    ("words", "line", "message"),
    [
        (["--policy", "nope"], "", "no policy 'nope'"),
        (["--context", "1"], "", "context=1 is not a whole number from 2"),
        (["--max-new-tokens", "0"], "", "max_new_tokens=0"),
        (["--top-k=-2"], "", "top_k is -2"),
        (["--budget", "0"], "", "budget=0"),
        (["--context", "5000"], "", "do not fit the model's 1152 positions"),
        (["--load", "nowhere"], "", "nowhere has no saved conversation"),
        ([], "/save", "/save needs a name"),
        ([], "/save kept", "the conversation has no turn yet"),
        ([], "/load nowhere", "nowhere has no saved conversation"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str], line: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(line + "\n"))
    assert chat.main(words) == 2
    said = capsys.readouterr().err
    assert message in said and said.startswith("kvjax chat: ") and said.count("\n") == 1


def test_an_unknown_command_of_a_pipe_is_a_turn_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/nwe Hello\n/save {tmp_path / 'kept'}\n"))
    with pytest.warns(UserWarning, match=r"no command /nwe; did you mean /new\? The line is read as a turn"):
        assert chat.main(WORDS) == 0
    use, saved = capsys.readouterr().err.splitlines()
    seen = use.removeprefix("[").partition(" ")[0]
    assert saved == f"wrote a conversation of {seen} tokens to {tmp_path / 'kept'}" and (tmp_path / "kept").is_dir()


def test_lines_of_a_pipe_are_turns() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvjax", "chat", *WORDS],
        input="\n".join(TURNS),
        env=os.environ | fast_environment() | {"JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    uses = done.stderr.splitlines()
    assert len(uses) == 2 and all("16 of 16 slots per head hold one" in use for use in uses) and done.stdout.strip()


def test_a_conversation_of_another_vocabulary_or_none_is_refused(
    model: kvjax.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = Conversation(model, **SMALL)
    "".join(talk.reply(TURNS[0]))
    kept = tmp_path / "kept"
    talk.save(kept)
    told = json.loads((kept / saved_chat.SAVED).read_text())
    (kept / saved_chat.SAVED).write_text(json.dumps(told | {"text": [10**6, *told["text"]]}))
    with pytest.raises(ValueError, match="has a conversation of another model, policy or dtype; start with those"):
        Conversation(model, **SMALL).load(kept)
    for content in (
        "no JSON",
        "[1]",
        "{}",
        *(json.dumps(told | each) for each in ({"text": []}, {"text": ["a"]}, {"text": 5})),
        *(json.dumps(told | {"leaves": each}) for each in (3, [3], [[[2], "nothing"]])),
    ):
        (kept / saved_chat.SAVED).write_text(content)
        assert chat.main([*WORDS, "--load", str(kept)]) == 2
        said = capsys.readouterr().err
        assert said == f"kvjax chat: {kept / saved_chat.SAVED} is no saved conversation's; give another name.\n"


def cut(text: list[int]) -> list[int]:
    return text[:-8]


def exchanged(text: list[int]) -> list[int]:
    return [*text[:3], text[3] + 1, *text[4:]]


def test_a_damaged_conversation_is_refused(model: kvjax.Model, tmp_path: Path) -> None:
    talk = Conversation(model, **SMALL)
    "".join(talk.reply(TURNS[0]))
    kept = tmp_path / "kept"

    def refusal(directory: Path = kept) -> str:
        with pytest.raises(ValueError) as raised:
            Conversation(model, **SMALL).load(directory)
        return str(raised.value)

    changed = (
        f"the conversation in {kept} is damaged: its text or its arrays are not those that were saved; load another"
    )
    for change in (cut, exchanged):
        talk.save(kept)
        told = json.loads((kept / saved_chat.SAVED).read_text())
        (kept / saved_chat.SAVED).write_text(json.dumps(told | {"text": change(told["text"])}))
        assert refusal().startswith(changed)
    for key, value in (("digest", None), ("form", 3), ("fits", 5), ("leaves", [[[-1], "int32"]]), ("text", [-1])):
        (kept / saved_chat.SAVED).write_text(json.dumps(told | {key: value}))
        assert refusal() == f"{kept / saved_chat.SAVED} is no saved conversation's; give another name."
    (kept / saved_chat.SAVED).write_text(json.dumps(told | {"text": [*told["text"][:-1], 10**6]}))
    assert "another model" in refusal()
    talk.save(kept)
    for file in sorted((kept / "state").rglob("*"), key=lambda file: file.stat().st_size * file.is_file())[-1:]:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert "is damaged: its" in refusal() and "\n" not in refusal()
    shutil.rmtree(kept / "state")
    assert f"{kept} is damaged: its arrays cannot be read" in refusal()


def test_a_conversation_of_0_2_0_with_a_cut_text_is_refused(model: kvjax.Model, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    shutil.copytree(DATA / "conversation_0.2.0" / "h2o", kept)
    told = json.loads((kept / saved_chat.SAVED).read_text())
    tokens = len(told["text"])
    (kept / saved_chat.SAVED).write_text(json.dumps(told | {"text": cut(told["text"])}))
    talk = Conversation(model, policy="h2o", budget=24, context=96, max_new_tokens=8, temperature=0.0)
    message = f"is damaged: its text has {tokens - 8} tokens, and its cache is that of {tokens - 1}; load another one"
    with pytest.warns(UserWarning, match="older"), pytest.raises(ValueError, match=message):
        talk.load(kept)


def test_a_conversation_of_a_model_with_other_weights_is_refused(model: kvjax.Model, tmp_path: Path) -> None:
    talk = Conversation(model, **SMALL)
    "".join(talk.reply(TURNS[0]))
    talk.save(tmp_path / "kept")
    weights = jax.tree.map_with_path(
        lambda path, leaf: leaf * 1.5 if "query" in jax.tree_util.keystr(path) else leaf, model.weights
    )
    tuned = Conversation(kvjax.Model(weights, model.config, model.name, model.directory), **SMALL)
    with pytest.raises(ValueError, match="has a conversation of another model, policy or dtype"):
        tuned.load(tmp_path / "kept")


def test_a_conversation_with_damaged_arrays_is_refused(model: kvjax.Model, tmp_path: Path) -> None:
    talk = Conversation(model, **SMALL)
    "".join(talk.reply(TURNS[0]))
    talk.save(tmp_path / "kept")
    largest = max((tmp_path / "kept" / "state").rglob("*"), key=lambda file: file.stat().st_size * file.is_file())
    largest.write_bytes(largest.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"is damaged: its arrays cannot be read \(.*\); load another one"):
        Conversation(model, **SMALL).load(tmp_path / "kept")


def test_devices_along_data_are_refused_before_a_model_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="a conversation is one row and cannot be sharded over data=2"):
        chat.check_devices(2)
    assert chat.main(["--model", "/nowhere", "--mesh", "data=999"]) == 2
    assert "asks for 999 devices" in capsys.readouterr().err
