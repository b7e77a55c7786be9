"""Sampling settings of a model's checkpoint: used where nobody gives one, checked where used, and announced."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import kvjax
from kvjax.cli.main import main
from kvjax.generation.chat import Conversation
from kvjax.generation.generate import begin, generate_ids
from kvjax.generation.sampling import GREEDY, Sampling, defaults_in_force, sampling_of
from kvjax.models.model import SamplingDefaults
from kvjax.tiny import WEIGHTS

QWEN = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}
WRONG = {"temperature": "hot", "top_k": [1], "repetition_penalty": -2}


def model_with(settings: Mapping[str, Any]) -> kvjax.Model:
    tiny = kvjax.load("tiny")
    defaults = SamplingDefaults(settings, "generation_config.json")
    return kvjax.Model(tiny.weights, tiny.config, tiny.name, tiny.directory, sampling_defaults=defaults)


@pytest.mark.parametrize(
    ("settings", "own", "expected", "in_force"),
    [
        ({}, {}, Sampling(0.8), ()),
        ({}, {"top_k": 5}, Sampling(0.8, top_k=5), ()),
        (QWEN, {}, Sampling(0.7, 20, 0.8, None, 1.1), ("temperature", "top_k", "top_p", "repetition_penalty")),
        (QWEN, {"temperature": 1.5}, Sampling(1.5, 20, 0.8, None, 1.1), ("top_k", "top_p", "repetition_penalty")),
        (QWEN, {"top_k": 0, "top_p": 1.0, "min_p": None}, Sampling(0.7, None, 1.0, None, 1.1), None),
        (QWEN, {"temperature": 0}, Sampling(0.0, None, None, None, 1.1), ("repetition_penalty",)),
        (QWEN, GREEDY, Sampling(0.0, repetition_penalty=1.0), ()),
        ({"do_sample": False}, {}, Sampling(0.0), ("temperature",)),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {}, Sampling(0.0), ("temperature",)),
        ({"do_sample": False, "top_p": 0.9}, {"temperature": 0.5}, Sampling(0.5, top_p=0.9), ("top_p",)),
        ({"temperature": 0.0, "top_k": 3}, {}, Sampling(0.0), ("temperature",)),
        ({"top_k": -1, "top_p": 1, "min_p": 0}, {}, Sampling(0.8, None, 1.0, 0.0), ()),
        ({"min_p": 0.05, "top_k": 50.0}, {}, Sampling(0.8, 50, None, 0.05), ("top_k", "min_p")),
        (WRONG, {"temperature": 1.0, "top_k": 2, "repetition_penalty": 1.3}, Sampling(1.0, 2, None, None, 1.3), ()),
        (WRONG, GREEDY, Sampling(0.0, repetition_penalty=1.0), ()),
    ],
    ids=str,
)
def test_own_settings_come_before_the_models(
    settings: dict[str, Any], own: dict[str, Any], expected: Sampling, in_force: tuple[str, ...] | None
) -> None:
    defaults = SamplingDefaults(settings, "generation_config.json")
    assert sampling_of(defaults, own) == expected
    assert in_force is None or tuple(defaults_in_force(defaults, own)) == in_force
    # As the settings of a server, they do the same for requests that give none.
    assert sampling_of(defaults.replaced(own), {}) == expected


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"temperature": "0.6"}, "temperature is '0.6': give a number, or replace"),
        ({"temperature": -1}, "The temperature is -1: give 0 for greedy decoding or a positive number, or replace"),
        ({"top_k": True}, "top_k is True: give a number"),
        ({"top_k": 2.5}, "top_k is 2.5: give a whole number"),
        ({"top_p": 3}, "top_p is 3: give a share"),
        ({"min_p": {}}, "min_p is {}: give a number"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0: give a positive number"),
        ({"do_sample": "yes"}, "do_sample is 'yes': give true or false"),
    ],
    ids=str,
)
def test_a_wrong_setting_names_its_file(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        sampling_of(SamplingDefaults(settings, "m/generation_config.json"), {})
    assert str(error.value).startswith(f"m/generation_config.json: {sentence}")


def test_every_way_to_text_takes_them() -> None:
    settings, prompt = {"do_sample": False, "repetition_penalty": 3.0}, "Once upon a time"
    model, plain = model_with(settings), kvjax.load("tiny")
    wanted = plain.generate(prompt, max_new_tokens=8, temperature=0.0, repetition_penalty=3.0)
    assert wanted != plain.generate(prompt, max_new_tokens=8, temperature=0.0)
    assert model.generate(prompt, max_new_tokens=8) == wanted == ["".join(model.stream(prompt, max_new_tokens=8))]


def test_a_wrong_setting_is_refused_before_the_first_text() -> None:
    model, sentence = model_with(WRONG), r"^generation_config\.json: temperature is 'hot': give a number"
    with pytest.raises(ValueError, match=sentence):
        begin(model, [[5]])
    with pytest.raises(ValueError, match=sentence):
        Conversation(model)


def test_a_beam_search_has_no_use_for_them() -> None:
    beams: dict[str, Any] = dict(beams=2, max_new_tokens=3)
    tokens = [generate_ids(model, [[5, 17]], **beams).tokens for model in (kvjax.load("tiny"), model_with(WRONG))]
    assert tokens[0] == tokens[1]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    shutil.copytree(WEIGHTS, tmp_path / "m")
    return tmp_path / "m"


def write(directory: Path, settings: dict[str, Any]) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, **settings}))


def test_commands_tell_which_apply(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(directory, {**QWEN, "top_p": None})
    file, prompts = directory / "generation_config.json", tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Once"}\n')
    words = ["generate", "--model", str(directory), "--max-new-tokens", "2"]
    line = f"kvjax {{}}: {file} sets {{}}repetition_penalty=1.1; options replace them.\n"
    for more, said in (
        (["--prompt", "Once"], line.format("generate", "temperature=0.7, top_k=20, ")),
        (["--prompt", "Once", "--temperature", "0"], line.format("generate", "")),
        (["--prompt-file", str(prompts), "--top-k", "0"], line.format("generate", "temperature=0.7, ")),
    ):
        assert main([*words, *more]) == 0
        assert capsys.readouterr().err.startswith(said)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", "--model", str(directory), "--temperature", "1"]) == 0
    assert capsys.readouterr().err == line.format("chat", "top_k=20, ")
    assert main([*words, "--prompt", "Once", "--beams", "2"]) == 0
    assert "sets" not in capsys.readouterr().err


def test_lines_of_other_defaults_are_of_another_run(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "Once"}\n')
    words = ["generate", "--model", str(directory), "--max-new-tokens", "2", "--prompt-file", str(prompts)]
    codes = []
    for settings in ({"temperature": 0.5}, {"temperature": 0.5, "top_p": 1.0}, {"temperature": 0.4}):
        write(directory, settings)
        codes.append(main([*words, "--out", str(out)]))
    assert codes == [0, 0, 2]
    assert "out.jsonl exists and is not of this run" in capsys.readouterr().err
