"""Damaged files of every kind that is read: reading ends soon, without an error or with a sentence that names them."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.cli.batch_files import read_prompt_lines, read_question_lines
from kvjax.evaluation.grid import RowFile
from kvjax.evaluation.tasks.cases import read_cases
from kvjax.generation.chat import Conversation
from kvjax.methods.less import checkpoint as less
from kvjax.methods.triattention import load as load_queries
from kvjax.model import load
from kvjax.models.checkpoints.orbax import write_orbax
from kvjax.tiny import WEIGHTS
from kvjax.utils.files import MOST_JSON
from kvjax.utils.settings import read_config
from tests.conftest import EXAMPLES
from tests.models.checkpoints.test_gguf import SETTINGS, add, pieces, tensors_of, write_gguf
from tests.models.checkpoints.test_loading import split, write

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Where one array of Orbax cannot be read, its threads that read others print errors."""
SECONDS = 20.0
"""Longest time of reading one set of files, all of which are small."""
TEXT = "Once upon a time, 42! naïve \U0001f600"
DEEP = 100_000
VALUES: tuple[Any, ...] = (None, True, -1, 0, 1, 2**31, 10**30, 1e308, float("nan"), "", "x", "é" * 999, [], {}, [[]])
CONTENTS = (
    b"",
    b"[]",
    b"{}",
    b"null",
    b'"x"',
    b"[" * DEEP,
    b'{"a":' * DEEP,
    b"a = " + b"[" * DEEP,
    b"\xff\xfe",
    b"9" * 9999,
)


@dataclasses.dataclass(frozen=True)
class Format:
    """A kind of files.

    Attributes:
        make: writes sound ones to a directory.
        read: reads them.
    """

    make: Callable[[Path], Any]
    read: Callable[[Path], Any]


@functools.cache
def tiny() -> kvjax.Model:
    return kvjax.load("tiny")


def make_directory(directory: Path) -> None:
    write(directory, vocab_size=2048)
    shutil.copy(WEIGHTS / "tokenizer.json", directory)
    settings = json.loads((WEIGHTS / "tokenizer_config.json").read_text())
    template = [{"name": "default", "template": settings["chat_template"]}]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))


def make_shards(directory: Path) -> None:
    write(directory)
    split(directory)


def make_gguf(directory: Path) -> None:
    extra = pieces() | {"tokenizer.chat_template": "{{ messages[0].content }}"}
    write_gguf(directory / "model.gguf", SETTINGS, tensors_of(SETTINGS), extra=lambda writer: add(writer, extra))


def make_orbax(directory: Path) -> None:
    write(directory)
    write_orbax(load(directory).weights, directory / "weights")
    (directory / "model.safetensors").unlink()


def make_kernels(directory: Path) -> None:
    shutil.copytree(less.SHIPPED / "h2o_10", directory, dirs_exist_ok=True)


def make_queries(directory: Path) -> None:
    shutil.copy(WEIGHTS.parent / "queries" / "queries.safetensors", directory)


def make_config(directory: Path) -> None:
    (directory / "own.toml").write_text('policy = "h2o"\nbudget = [4, 4]\n[settings]\nrecent = 0.5\nresidual.a = [1]\n')


def make_lines(directory: Path) -> None:
    (directory / "prompts.jsonl").write_text(
        '{"prompt": "a", "id": 1}\n{"messages": [{"role": "user", "content": "b"}]}\n'
    )
    (directory / "questions.jsonl").write_text('{"question": "a?"}\n')
    (directory / "cases.jsonl").write_text('{"context": "a", "question": "b", "answer": ["c"]}\n')
    (directory / "rows.jsonl").write_text('{"model": "tiny", "budget": 4}\n')


def make_conversation(directory: Path) -> None:
    talk = conversation()
    list(talk.reply("Hello"))
    talk.save(directory / "talk")


def conversation() -> Conversation:
    return Conversation(tiny(), policy="streaming", budget=16, context=64, max_new_tokens=2, temperature=0.0)


def read_model(place: Path) -> None:
    model = load(place)
    tokenizer = model.tokenizer
    tokenizer.decode(tokenizer.encode(TEXT))
    assert isinstance(model.least_tokens(TEXT), int)
    _ = tokenizer.chat_template


def read_lines(directory: Path) -> None:
    read_prompt_lines(directory / "prompts.jsonl")
    read_question_lines(directory / "questions.jsonl")
    read_cases(directory / "cases.jsonl")
    RowFile(directory / "rows.jsonl")


FORMATS: Mapping[str, Format] = {
    "directory": Format(make_directory, read_model),
    "shards": Format(make_shards, load),
    "GGUF": Format(make_gguf, lambda directory: read_model(directory / "model.gguf")),
    "Orbax": Format(make_orbax, load),
    "LESS kernels": Format(make_kernels, lambda directory: less.load(directory, tiny(), "h2o")),
    "mean queries": Format(make_queries, lambda directory: load_queries(str(directory), tiny())),
    "TOML": Format(make_config, lambda directory: read_config(str(directory / "own.toml"))),
    "lines": Format(make_lines, read_lines),
    "conversation": Format(make_conversation, lambda directory: conversation().load(directory / "talk")),
}

QUICK = [kind for kind in FORMATS if kind != "conversation"]
"""Kinds that are read without compiling a model."""


@functools.cache
def sound(kind: str) -> Mapping[str, bytes]:
    """The files of a kind by their paths in a directory."""
    with tempfile.TemporaryDirectory() as place:
        FORMATS[kind].make(directory := Path(place))
        return {
            str(file.relative_to(directory)): file.read_bytes()
            for file in sorted(directory.rglob("*"))
            if file.is_file()
        }


def with_other_value(draw: random.Random, value: Any) -> Any:
    """JSON in which one value, somewhere, is another one or is missing."""
    if not isinstance(value, (dict, list)) or not value or draw.random() < 0.1:
        return draw.choice(VALUES)
    key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
    changed: Any = value.copy()
    if draw.random() < 0.1:
        del changed[key]
    else:
        changed[key] = with_other_value(draw, value[key])
    return changed


def other_bytes(draw: random.Random, content: bytes) -> bytes:
    """Bytes with one change, more often near their beginning, where headers are."""
    start = int(len(content) * draw.random() ** draw.choice((1, 6)))
    end = min(len(content), start + draw.choice((1, 1, 4, 8, 64)))
    inside = draw.choice(
        (b"", draw.randbytes(end - start), b"\0" * (end - start), b"\xff" * (end - start), content[start:end] * 2)
    )
    return content[:start] + inside + content[end:] if draw.random() < 0.9 else content[:start]


def damage(draw: random.Random, file: Path) -> None:
    """Change a file in one way."""
    content, way = file.read_bytes(), draw.random()
    if way < 0.1:
        file.unlink()
        make = (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path), lambda path: None)
        draw.choice(make)(file)
    elif way < 0.25:
        file.write_bytes(draw.choice(CONTENTS))
    elif file.suffix == ".json" and way < 0.8:
        file.write_text(json.dumps(with_other_value(draw, json.loads(content))))
    else:
        file.write_bytes(other_bytes(draw, content))


def check(kind: str, seed: int) -> None:
    """Damage a file of a kind, and read it."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        for name, content in sound(kind).items():
            file = Path(place) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        damage(draw, Path(place) / draw.choice(sorted(sound(kind))))
        began = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                FORMATS[kind].read(Path(place))
            except ValueError as error:
                assert place in str(error) and "\n" not in str(error), repr(error)
        assert time.monotonic() - began < SECONDS


READ_HERE = (".json", ".jsonl", ".toml", ".gguf", ".safetensors")
"""Endings of the files whose reading would wait for a pipe's writer."""


@pytest.mark.parametrize("kind", QUICK)
def test_pipes_are_refused_before_they_are_opened(kind: str, tmp_path: Path) -> None:
    for name, content in sound(kind).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    for name in (name for name in sound(kind) if Path(name).suffix in READ_HERE):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
            FORMATS[kind].read(tmp_path)
        (tmp_path / name).unlink()
        (tmp_path / name).write_bytes(sound(kind)[name])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"features": "8"}, r"TypeError: features='8' is not a whole number"),
        ({"hidden": 2**40}, r"ValueError: hidden=1099511627776 is not a whole number from 1 to 65536"),
        ({"policy_settings": []}, r"TypeError: policy_settings is \[\]"),
        ({"dtype": "O"}, r"ValueError: dtype is 'O'"),
        ({"other": 1}, r"TypeError: .*unexpected keyword argument 'other'"),
    ],
)
def test_settings_of_kernels_of_another_kind_are_named(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    make_kernels(tmp_path)
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=rf"settings\.json is damaged \({sentence}"):
        less.load(tmp_path, tiny(), "h2o")


def test_files_beyond_the_size_of_settings_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as stream:
        stream.truncate(MOST_JSON + 1)  # takes no space on the disk
    with pytest.raises(
        ValueError, match=rf"config\.json has {MOST_JSON + 1} bytes, more than the {MOST_JSON} of any file"
    ):
        load(tmp_path)


SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("kind", QUICK)
@given(seed=SEEDS)
def test_damaged_files_are_named(kind: str, seed: int) -> None:
    check(kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
@given(seed=SEEDS)
@settings(max_examples=50 * EXAMPLES)  # which take a tenth of a second each
def test_damaged_files_are_named_at_length(kind: str, seed: int) -> None:
    check(kind, seed)
