"""How texts and turns begin and end: bos, the ids that end an answer, and those that a user names."""

from __future__ import annotations

import functools
import json
import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

import kvjax
from kvjax import generate
from kvjax.generation.chat import Conversation
from kvjax.generation.generate import Logprob, generate_ids
from kvjax.generation.prompts import encode, end_ids
from kvjax.generation.questions import encode_questions
from kvjax.generation.sampling import Sampling
from kvjax.models.checkpoints.gguf_tokenizer import gguf_tokenizer
from kvjax.models.tokenizer import lazy_tokenizer
from kvjax.serving.engine import Engine
from kvjax.serving.openai import bodies
from kvjax.serving.openai.answer import Answer
from kvjax.serving.requests import Finished, Piece, Request
from tests import tokenizing
from tests.small_models import random_model, small_config

TEMPLATE = (
    "{% for m in messages %}{{ 'w2 ' if m.role == 'user' else 'w3 ' }}{{ m.content }}"
    "{{ (' ' + END) if m.role == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'w3 ' }}{% endif %}"
)
TURN = "w20 w21 w22"
DRAWN: dict[str, Any] = dict(policy="full", max_new_tokens=12, temperature=1.0, seed=4)


@functools.cache
def plain() -> kvjax.Model:
    return random_model(small_config(4, 2, eos=(0,), max_positions=128), seed=3)


def talking(end: int | None, how: str = "") -> kvjax.Model:
    """A model whose answers end with a token that only its tokenizer or only its template says."""
    model = kvjax.Model(plain().weights, plain().config, "random")
    template = TEMPLATE.replace("END", f"'w{end} '" if how == "template" else "''")
    eos: dict[str, Any] = {"eos_token": f"w{end}"} if how == "eos_token" else {}
    special = (end,) if end is not None and how else ()
    model.tokenizer = tokenizing.words(special=special, chat_template=template, **eos)
    return model


@functools.cache
def endless() -> list[int]:
    """An answer that nothing ends."""
    model = talking(None)
    return generate_ids(model, [encode(model, TURN, chat=True)], stop_at_eos=False, **DRAWN).tokens[0]


def fresh(first: int = 4) -> int:
    """A token of the answer that comes late in it, and not before."""
    made = endless()
    return next(token for place, token in enumerate(made) if place >= first and token not in [0, *made[:place]])


def before(end: int) -> str:
    made = endless()
    return "".join(f" w{token}" for token in made[: made.index(end)])


@pytest.mark.parametrize("how", ["eos_token", "template"])
def test_a_turn_ends_with_the_tokenizers_and_the_templates_own_token(how: str, tmp_path: Path) -> None:
    end = fresh()
    model, ids = talking(end, how), encode(talking(end, how), TURN, chat=True)
    assert end_ids(model) == (0,) and end_ids(model, chat=True) == (0, end)
    turns = [{"role": "user", "content": TURN}]
    assert model.generate(TURN, chat=True, **DRAWN) == [before(end)]
    assert model.generate([turns], chat=True, **DRAWN) == [before(end)]
    assert "".join(model.stream(TURN, chat=True, **DRAWN)) == before(end)
    assert "".join(Conversation(model, **DRAWN).reply(TURN)) == before(end)
    # A text that is no turn ends as it does for transformers, by the config's ids.
    assert generate_ids(model, [ids], **DRAWN).tokens != generate_ids(model, [ids], chat=True, **DRAWN).tokens
    assert model.generate(TURN, chat=True, stop_at_eos=False, **DRAWN)[0].startswith(f"{before(end)} w")
    greedy: dict[str, Any] = dict(max_new_tokens=6, temperature=0.0, beams=2)
    searched = generate_ids(model, [ids], chat=True, **greedy).tokens
    assert searched == generate_ids(model, [ids], stop_token_ids=[end], **greedy).tokens


def test_lines_of_a_file_end_as_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = talking(fresh(), "eos_token"), tmp_path / "prompts.jsonl"
    text = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": TURN}], tokenize=False, add_generation_prompt=True
    )
    lines: list[Any] = [{"messages": [{"role": "user", "content": TURN}]}, {"prompt": text}]
    file.write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr("kvjax.model.load", lambda *_, **__: model)
    words = ["--max-new-tokens", "12", "--temperature", "1", "--seed", "4"]
    assert generate.main(["--prompt-file", str(file), *words]) == 0
    told = {line["line"]: line["text"] for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert told[1] == before(fresh()) and told[2].startswith(f"{told[1]} w")
    for chat, wanted in ((["--chat"], before(fresh())), ([], told[2])):
        prompt = TURN if chat else text
        assert generate.main(["--prompt", prompt, *chat, *words]) == 0
        assert capsys.readouterr().out == f"{wanted}\n"
    named = ["--prompt", text, "--stop-token-ids", str(endless()[1]), *words]
    assert generate.main(named) == 0 and capsys.readouterr().out == f" w{endless()[0]}\n"
    assert generate.main(["--prompt", text, "--stop-token-ids", "64"]) == 2
    assert "token 64 is not in the vocabulary of 64" in capsys.readouterr().err


def test_a_template_without_an_end_or_with_other_turns_ends_nothing() -> None:
    model = talking(None)
    assert end_ids(model, chat=True) == (0,)
    model.tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert end_ids(model, chat=True) == (0,)
    model.tokenizer.chat_template = None
    assert end_ids(model, chat=True) == (0,)


def test_ids_that_a_user_names_end_a_text() -> None:
    model, end = talking(None), fresh()
    prompt = model.tokenizer.decode(encode(model, TURN, chat=True))
    for chat, text in ((True, TURN), (False, prompt)):
        arguments: dict[str, Any] = dict(chat=chat, stop_token_ids=[end], **DRAWN)
        assert model.generate(text, **arguments) == [before(end)] == ["".join(model.stream(text, **arguments))]
        assert model.generate(text, stop_at_eos=False, **arguments) == [before(end)]
    assert "".join(Conversation(model, stop_token_ids=[end], **DRAWN).reply(TURN)) == before(end)
    for number in (64, -1):
        with pytest.raises(ValueError, match=f"token {number} is not in the vocabulary of 64"):
            model.generate("w5", stop_token_ids=[number])
    unfit: list[Any] = [["a"], [True], 5, "5"]
    for wrong in unfit:
        with pytest.raises(TypeError, match="is not a list of token ids"):
            model.generate("w5", stop_token_ids=wrong)


def test_a_beam_search_ends_a_text_at_its_stop_string() -> None:
    model = talking(None)
    greedy: dict[str, Any] = dict(max_new_tokens=6, beams=2, policy="full")
    (whole,) = generate_ids(model, [[5, 6]], **greedy).tokens
    at = next(place for place in range(1, 6) if whole[place] not in whole[:place])
    made = generate_ids(model, [[5, 6]], stop=f"w{whole[at]}", **greedy)
    assert made.tokens == [whole[: at + 1]]


def test_the_engine_ends_turns_and_finds_special_tokens() -> None:
    end = fresh()
    model = talking(end, "template")
    ids = tuple(encode(model, TURN, chat=True))
    with Engine(model, "full", rows=1, chunk=16, steps=4, context=64, snapshot_bytes=0) as engine:

        def ask(**changes: Any) -> tuple[str, str]:
            told: queue.Queue[Piece | Finished] = queue.Queue()
            engine.submit(Request(ids, max_tokens=12, sampling=Sampling(1.0), seed=4, **changes), told.put)
            text = ""
            while isinstance(news := told.get(timeout=60), Piece):
                text += news.text
            return text, news.reason

        assert ask(chat=True) == ask(stop_ids=(end,)) == ask(stop=(f"w{end}",)) == (before(end), "stop")
        assert len(ask()[0]) > len(before(end))


def asked(model: kvjax.Model, **body: Any) -> bodies.ParsedBody:
    serving: Any = SimpleNamespace(model=model, context=128, budget=64)
    return bodies.chat(serving, {"messages": [{"role": "user", "content": "Once upon a time"}]} | body, 16)


def test_a_chat_over_http_is_one() -> None:
    model = talking(None)
    assert [each.chat for each in asked(model, n=2).requests] == [True, True]


def gguf(**changes: Any) -> Any:
    made = tokenizing.sentencepiece()
    tokens = [made.convert_ids_to_tokens(i) for i in range(len(made))]
    kinds = [2, 3, 3, 3] + [6] * 256 + [1] * (len(tokens) - 260)
    metadata = {"model": "llama", "tokens": tokens, "scores": [-float(i) for i in range(len(tokens))]}
    metadata |= {"token_type": kinds, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{name}": value for name, value in (metadata | changes).items()}


PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.mark.parametrize("template", [PLAIN, f"{{{{ bos_token }}}}{PLAIN}"])
@pytest.mark.parametrize(("kind", "begins"), [("hf", True), ("hf", False), ("gguf", True), ("gguf", False)])
def test_a_chat_begins_with_one_bos_where_texts_do(template: str, kind: str, begins: bool) -> None:
    config = small_config(4, 2, eos=(2,), max_positions=256, vocab_size=320)
    model = random_model(config)
    if kind == "hf":
        model.tokenizer = tokenizing.sentencepiece(begins=begins, chat_template=template)
    else:
        metadata = gguf(add_bos_token=begins) | {"tokenizer.chat_template": template}
        model.tokenizer = lazy_tokenizer(*gguf_tokenizer(metadata))
    once = begins or template != PLAIN
    turns = [{"role": "user", "content": "Once upon a time"}]
    ids = encode(model, turns)
    assert ids.count(1) == once and (ids[0] == 1) == once
    assert encode(model, "Once upon a time", chat=True) == ids == list(asked(model).requests[0].prompt)
    about, questions = encode_questions(model, turns[0]["content"], ["Upon?", "Time?"], chat=True)
    assert about.count(1) == once and (about[0] == 1) == once and not any(1 in each for each in questions)
    talk = Conversation(model, max_new_tokens=3, stop_at_eos=False)
    for _ in range(2):
        "".join(talk.reply("Once upon a time"))
    assert talk.text[: len(ids)] == ids
    between = "<|end|>user: Once upon a time<|end|>assistant: "
    second = model.tokenizer.encode(between, add_special_tokens=False)
    assert talk.text[len(ids) + 3 : -3] == second and 1 not in second


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("said", [True, False, None])
def test_the_tokenizers_settings_say_what_a_chat_begins_with(said: bool | None, begins: bool, tmp_path: Path) -> None:
    tokenizing.sentencepiece(begins=begins).backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    config |= {"chat_template": PLAIN} | ({} if said is None else {"add_bos_token": said})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    small = random_model(small_config(4, 2, vocab_size=320))
    model = kvjax.Model(small.weights, small.config, directory=tmp_path)
    assert (encode(model, "Once", chat=True)[0] == 1) == (begins if said is None else said)
    # Transformers reads tokenizer.json alone for any other text.
    text = encode(model, "Once")
    assert text == PreTrainedTokenizerFast.from_pretrained(tmp_path).encode("Once") and (text[0] == 1) == begins


def test_log_probabilities_name_tokens_as_the_text_has_them() -> None:
    """In OpenAI's forms: two tokens have two names, offsets are places in the text, and bytes are always there."""
    model = random_model(small_config(4, 2, vocab_size=320))
    model.tokenizer = tokenizing.sentencepiece()
    prompt = model.tokenizer.encode("Once upon a")
    written = model.tokenizer.encode("Once upon a time, 東 time")[len(prompt) :]
    serving: Any = SimpleNamespace(model=model, context=128, budget=64)
    time = model.tokenizer.convert_tokens_to_ids("time")
    likeliest = ((written[0], -0.5), (time, -1.5))
    logprobs = [Logprob(token, -0.5, likeliest) for token in written]
    for chat in (False, True):
        body: dict[str, Any] = {"prompt": prompt, "logprobs": 2}
        answer = Answer(serving, bodies.completion(serving, body)._replace(chat=chat))
        text = " time, 東 time"
        answer.piece(0, Piece(text, tuple(written), tuple(logprobs)))
        answer.finish(0, Finished("length", 4, len(written), 0, None))
        told = answer.response()["choices"][0]["logprobs"]
        if chat:
            assert bytes(byte for each in told["content"] for byte in each["bytes"]).decode() == text
            assert [each["token"] for each in told["content"][0]["top_logprobs"]] == [" time", "time"]
        else:
            whole = [place for place, name in enumerate(told["tokens"]) if not name.startswith("bytes:")]
            assert all(text.startswith(told["tokens"][i], told["text_offset"][i]) for i in whole)
            assert told["tokens"][3:6] == [r"bytes:\xe6", r"bytes:\x9d", r"bytes:\xb1"]
            assert len(set(told["text_offset"][3:6])) == 1
            assert set(told["top_logprobs"][0]) == {" time", "time"}
