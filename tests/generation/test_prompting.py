"""The ways to prompt: conversations, stop strings, samples, pieces, files of prompts and questions about one prompt."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import generate
from kvjax.cli import batch_files
from kvjax.generation.generate import generate_ids, texts_of
from kvjax.generation.prompts import encode
from kvjax.generation.questions import answer, encode_questions
from kvjax.inference import prefill

STORY = "Once upon a time there was a girl named Lily. She liked to play in the garden with her dog."
GREEDY: dict[str, Any] = dict(policy="h2o", budget=16, max_new_tokens=20, temperature=0.0)


@pytest.fixture(scope="module")
def model() -> kvjax.Model:
    return kvjax.load("tiny")


def test_a_text_ends_before_its_stop_string(model: kvjax.Model) -> None:
    whole = model.generate(STORY, **GREEDY)[0]
    stops = [whole[17:23], "zzz"]  # across tokens
    cut = whole[: whole.find(stops[0])]
    made = generate_ids(model, [encode(model, STORY)], stop=stops, **GREEDY)
    assert texts_of(model, made, stops) == [cut] == model.generate([STORY], stop=stops, **GREEDY)
    assert 0 < len(made.tokens[0]) < 20
    # The token that completes the stop string is the last one, and other rows go on.
    assert stops[0] in model.tokenizer.decode(made.tokens[0])
    assert stops[0] not in model.tokenizer.decode(made.tokens[0][:-1])
    prompts = [encode(model, text) for text in ("The dog", STORY)]
    alone = generate_ids(model, prompts[:1], stop=stops, **GREEDY).tokens
    assert generate_ids(model, prompts, stop=stops, **GREEDY).tokens == [*alone, *made.tokens] and len(alone[0]) == 20
    pieces = list(model.stream(STORY, stop=stops, **GREEDY))
    assert "".join(pieces) == cut and len(pieces) > 2


def test_samples_are_the_texts_of_the_next_seeds(model: kvjax.Model) -> None:
    arguments: dict[str, Any] = GREEDY | {"temperature": 1.0}
    samples = model.generate(STORY, num_samples=2, seed=2**32 - 1, **arguments)
    assert samples == model.generate([STORY, STORY], seed=[2**32 - 1, 0], **arguments)
    assert len(set(samples)) == 2


def test_penalties_and_log_probabilities_are_of_the_models_logits(model: kvjax.Model) -> None:
    ids = encode(model, STORY)
    made = generate_ids(model, [ids], max_new_tokens=12, temperature=0.0, repetition_penalty=1.5, logprobs=3)
    text = ids + made.tokens[0]
    rows = np.asarray(model.logits([text])[0, len(ids) - 1 : -1], np.float64)
    assert made.logprobs is not None and len(made.logprobs[0]) == 12
    for place, (each, logits) in enumerate(zip(made.logprobs[0], rows, strict=True), len(ids)):
        seen = np.isin(np.arange(len(logits)), text[:place])
        penalised = np.where(seen, np.where(logits > 0, logits / 1.5, logits * 1.5), logits)
        assert each.token == text[place] == penalised.argmax()
        known = logits - np.log(np.exp(logits).sum())
        assert each.logprob == pytest.approx(known[each.token], abs=1e-4)
        best = np.argsort(-known)[:3]
        assert [token for token, _ in each.likeliest] == best.tolist()
        np.testing.assert_allclose([logprob for _, logprob in each.likeliest], known[best], atol=1e-4)
    assert made.tokens[0] != generate_ids(model, [ids], max_new_tokens=12, temperature=0.0, logprobs=3).tokens[0]


TURNS = [
    {"role": "user", "content": "My name is Tom."},
    {"role": "assistant", "content": "Hello, Tom."},
    {"role": "user", "content": "Who am I?"},
]


def test_conversations_are_what_the_template_makes_of_them(model: kvjax.Model) -> None:
    text = "<|user|>\nBe kind.<|user|>\nMy name is Tom.<|assistant|>\nHello, Tom.<|endoftext|>"
    text += "<|user|>\nWho am I?<|assistant|>\n"
    ids = encode(model, TURNS, system="Be kind.")
    assert ids == model.tokenizer.encode(text, add_special_tokens=False)
    assert encode(model, "Hi", chat=True) == encode(model, [{"role": "user", "content": "Hi"}])
    made = generate_ids(model, [ids], **GREEDY)
    assert model.generate(TURNS, chat=True, system="Be kind.", **GREEDY) == texts_of(model, made)
    assert model.generate([TURNS], chat=True, system="Be kind.", **GREEDY) == texts_of(model, made)


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([{"role": "user"}], {"chat": True}, "message 1 is {'role': 'user'}; give"),
        (TURNS[:2], {"chat": True}, "the last message is an answer already"),
        ([{"role": "system", "content": "A"}, TURNS[0]], {"chat": True, "system": "B"}, "begin with a system's turn"),
        ("a", {"system": "B"}, "system='B' is a turn of a conversation; give chat=True"),
        ("a", {"stop": 5}, "stop=5 is not a text"),
        ("a", {"num_samples": 0}, "num_samples=0"),
        ("a", {"logprobs": 5000}, "logprobs=5000 is not a whole number from 0 to 2048"),
        ("a", {"min_p": 2}, "min_p is 2"),
        ("a", {"repetition_penalty": 0}, "repetition_penalty is 0"),
        ("a", {"stop_token_ids": [10**30]}, f"token {10**30} is not in the vocabulary"),
    ],
)
def test_a_mistake_in_a_call_is_one_sentence(model: kvjax.Model, prompts: Any, settings: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        model.generate(prompts, **settings)


def test_a_stream_refuses_at_once(model: kvjax.Model) -> None:
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (["a", "b"], {}, "2 prompts cannot be streamed at once"),
        ("a", {"num_samples": 2}, "num_samples=2: one text can be streamed"),
        ("a", {"beams": 2}, "model.stream has no keyword 'beams'"),
        ("a", {"top_k": -2}, "top_k is -2"),
    ]
    for prompt, settings, message in cases:
        with pytest.raises((TypeError, ValueError), match=message):
            model.stream(prompt, **settings)


def test_questions_know_nothing_of_each_other(model: kvjax.Model) -> None:
    prompt, questions = encode_questions(model, STORY, [" Who is Lily?", " Then Tom was"])
    together = [tokens for made in answer(model, prompt, questions, batch_size=2, **GREEDY) for tokens in made.tokens]
    # One after the other, from the state that the prompt left: each consumes its own.
    state, _ = kvjax.prefill(model, "h2o", [prompt], 16, max_new_tokens=36)
    for question, tokens in zip(questions, together, strict=True):
        after, logits = kvjax.extend(state, [question])
        alone: list[int] = []
        while len(alone) < len(tokens):
            alone.append(int(jnp.argmax(logits[0])))
            after, logits = kvjax.decode_step_in_place(after, [alone[-1]])
        assert alone == tokens
    assert len({tuple(tokens) for tokens in together}) > 1


def test_questions_in_a_chat_follow_the_prompt(model: kvjax.Model) -> None:
    for prompt, chat in (("A text.", True), (TURNS[:2], False), (TURNS[:1], False)):
        before, questions = encode_questions(model, prompt, ["Who?", "What?"], chat, "Be kind.")
        for text, ids in zip(("Who?", "What?"), questions, strict=True):
            last = {"role": "user", "content": f"A text.\n\n{text}" if chat else text}
            turns = [last] if isinstance(prompt, str) else [*prompt, last]
            assert before + ids == encode(model, turns, system="Be kind.")
    upper = kvjax.Model(model.weights, model.config, model.name, model.directory)
    upper.tokenizer.chat_template = "{{ messages[0]['content'] | upper }}"
    with pytest.raises(ValueError, match="does not leave a prompt as it is"):
        encode_questions(upper, "A text.", ["Who?"], True)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


WORDS = ["--policy", "h2o", "--budget", "16", "--max-new-tokens", "20", "--temperature", "0"]


def test_a_file_of_prompts_goes_on_where_it_was_cut(
    tmp_path: Path, model: kvjax.Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = [STORY, STORY[5:], STORY[9:]]
    asked = [{"role": "user", "content": STORY[20:]}]
    given: list[Any] = [{"prompt": prompt, "id": i} for i, prompt in enumerate(prompts)] + [{"messages": asked}]
    file.write_text("\n\n".join(map(json.dumps, given)))
    words = ["--prompt-file", str(file), *WORDS, "--batch-size", "2", "--out", str(out)]
    made, cut = generate_ids, []

    def interrupted(*arguments: Any, **settings: Any) -> Any:
        if len(cut) == 1:
            raise KeyboardInterrupt
        cut.append(arguments)
        return made(*arguments, **settings)

    monkeypatch.setattr(batch_files, "generate_ids", interrupted)
    assert generate.main(words) == 130 and not out.exists()
    with (tmp_path / ".out.jsonl.begun").open("a") as begun:
        begun.write('{"line": 1, "te')
    assert generate.main([*words, "--seed", "5"]) == 2
    assert "has the beginning of a run with other prompts or settings" in capsys.readouterr().err
    monkeypatch.setattr(batch_files, "generate_ids", made)
    assert generate.main(words) == 0
    already, *progress, costs, caches = capsys.readouterr().err.splitlines()
    assert already.endswith("2 of 4 lines are already done.")
    assert progress[0] == "[2/4] lines"  # later ones come after 10 seconds
    assert all(re.fullmatch(r"\[[34]/4(, \d+ s left)?\] lines, .*", line) for line in progress[1:])
    found = lines(out)
    new = sum(each["new_tokens"] for each in found[2:])
    assert re.fullmatch(rf"lines: 2; new: {new} tokens, [\d,]+ tokens/s; compilation: [\d.]+ s", costs)
    assert re.fullmatch(r"cache: [\d,]+ bytes in the largest batch, a full cache [\d,]+ bytes; results: (.*)", caches)
    assert caches.endswith(f" results: {out}")
    assert [each["line"] for each in found] == [1, 3, 5, 7]
    assert [each.get("id") for each in found] == [0, 1, 2, None]
    wanted = [model.generate(prompt, **GREEDY)[0] for prompt in prompts]
    assert [each["text"] for each in found] == [*wanted, *model.generate(asked, chat=True, **GREEDY)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.jsonl.run", "in.jsonl", "out.jsonl"]
    assert generate.main(words) == 0
    assert capsys.readouterr().err == f"{out}: all of 4 lines are already done.\n" and lines(out) == found
    for settings in (["--seed", "5"], ["--top-k", "3"]):
        assert generate.main([*words, *settings]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"kvjax generate: {out} exists and is not of this run;") and said.count("\n") == 1
    assert lines(out) == found


def test_lines_come_in_the_order_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps({"prompt": STORY[:end], "id": end}) + "\n" for end in (60, 9, 40, 20)))
    assert generate.main(["--prompt-file", str(file), *WORDS, "--batch-size", "1"]) == 0
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == [60, 9, 40, 20]


def test_questions_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "questions.txt"
    file.write_text(" Who is Lily?\r\n\n What did she do?\n")
    words = ["--prompt", STORY, "--questions", str(file), *WORDS]
    assert generate.main(words) == 0
    said, told = capsys.readouterr()
    assert re.match(
        r"\[0/2\] questions\n(\[.*\n)*lines: 2; new: 40 tokens, .* tokens/s; .*\n.* results: standard output", told
    )
    assert generate.main([*words, "--json"]) == 0
    out, told = capsys.readouterr()
    assert re.match(r"\[0/2\] lines\n(\[.*\n)*lines: 2; new: 40 tokens, ", told)
    found = [json.loads(line) for line in out.splitlines()]
    assert [(each["line"], each["question"]) for each in found] == [(1, " Who is Lily?"), (3, " What did she do?")]
    assert said == "".join(f"--- {each['question'].strip()}\n{each['text']}\n" for each in found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n\n{"prompt": 5}', 'in.jsonl, line 3: it is not of the form {"prompt": "..."}'),
        ('{"prompt": "a", "temperature": 1}', "line 1: it is not of the form"),
        ('{"prompt": "a", "messages": []}', "line 1: it is not of the form"),
        ("[1]", "line 1: it is not of the form"),
        ('{"prompt": "a"}\n{"prompt"', "line 2: it is not JSON"),
        ("[" * 10**5, "line 1: it is not JSON: it is nested too deeply"),
        ('{"prompt": "a", "id": NaN}', "line 1: it is not JSON: NaN is no number of JSON"),
        ('{"messages": []}', "line 1: there is no message"),
        ('{"messages": 5}', "line 1: messages=5 are no list"),
        ('{"prompt": "a"}\n{"prompt": " "}', "line 2: the prompt is empty"),
        ('{"prompt": "' + "a " * 1200 + '"}', "line 1: a text of"),
        ("\n", "has no line"),
    ],
)
def test_a_wrong_line_is_one_sentence_before_anything_runs(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "read_together", None)
    file = tmp_path / "in.jsonl"
    file.write_text(text)
    assert generate.main(["--prompt-file", str(file)]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--out out.jsonl", "--out takes what comes of --prompt-file FILE.jsonl or --questions"),
        ("--batch-size 3", "--batch-size is of --prompt-file FILE.jsonl and --questions"),
        ("--logprobs", "--logprobs is told in JSON"),
        ("--logprobs=-1 --json", "logprobs=-1"),
        ("--beams 2 --top-k 5", "top_k=5 has no effect on a beam search"),
        ("--length-penalty 2", "length_penalty=2.0 has no effect without beams"),
        ("--num-samples 0", "num_samples=0"),
        ("--num-samples 2 --show-cache", "draw one text"),
        ("--questions nowhere", "nowhere is not a file"),
        ("--questions QUESTIONS --show-cache", "draw one prompt"),
        ("--questions QUESTIONS --out nowhere/out.jsonl", "is not a .jsonl file in an existing directory"),
        ("--questions WRONG", 'WRONG.jsonl, line 1: it is not of the form {"question": "..."}'),
        ("--messages WRONG", "message 1 is {'prompt': ''}"),
        ("--messages QUESTIONS", "questions.txt is not JSON"),
        ("--messages OBJECT", "OBJECT.json: messages={} are no list"),
        ("--config OBJECT", "OBJECT.json is not TOML"),
        ("--policy h2o --plan adakv --set plan=adakv", "plan='adakv' is no setting of a policy"),
        ("--policy h2o --set name=tova", "name='tova' is no setting of a policy"),
        ("--policy h2o --set sinks=9999999999 --budget 8", "sinks=9999999999 is not a number below 2147483648"),
        ("--stop ", "stop='' would end every text"),
        ("--min-p 1.5", "min_p is 1.5"),
        ("--repetition-penalty -1", "repetition_penalty is -1.0"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "read_together", None)
    questions, wrong = tmp_path / "questions.txt", tmp_path / "WRONG.jsonl"
    questions.write_text("Who?\n")
    wrong.write_text('[{"prompt": ""}]')
    (tmp_path / "OBJECT.json").write_text("{}")
    files = {"QUESTIONS": str(questions), "WRONG": str(wrong), "OBJECT": str(tmp_path / "OBJECT.json")}
    given = [files.get(word, word) for word in words.split(" ")]
    prompt = [] if "--messages" in given else ["--prompt", STORY]
    assert generate.main([*prompt, *given]) == 2
    said = capsys.readouterr().err
    assert message in said and said.startswith("kvjax generate: ") and said.count("\n") == 1


def test_results_refuse_what_is_no_beginning(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    (tmp_path / ".out.jsonl.begun").write_text("")
    with pytest.raises(ValueError, match="has the beginning of a run with other prompts or settings"):
        batch_files.Results(out, {"seed": 0}, [1, 2, 3])
