"""Grids of measurements: named combinations of parts, rows that outlive what made them, and the tasks."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from kvjax.evaluate import command
from kvjax.evaluate.grid import Rows, combination, entries
from kvjax.policies.plan import AdaKV
from kvjax.policies.residuals.less import LowRankMemory

WORDS = "The old man went down to the river with his dog and a lamp, for it was late. " * 12


def test_a_name_says_which_parts() -> None:
    made = combination("keyformer+less+int8+adakv[noise=none, recent=9, special=(3,4), residual.kernels=performer]")
    assert made.name == "keyformer" and made.codec.bits == 8 and isinstance(made.plan, AdaKV)
    assert isinstance(made.residual, LowRankMemory) and made.residual.kernels == "performer"
    assert made.protection.recent == 9 and made.protection.special == (3, 4)
    compared = [(each.label, each.budget) for each in entries("h2o,snapkv[kernel=5,recent=4],fastgen,full", "8,0.5")]
    assert compared == [
        *[("full", 1.0), ("h2o", 8), ("h2o", 0.5)],
        *[("snapkv[kernel=5,recent=4]", 8), ("snapkv[kernel=5,recent=4]", 0.5), ("fastgen", 1.0)],
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h2o+int5", "'int5' is none of uniform, "),
        ("h2o+int8+int4", "two of a kind, int8 and int4"),
        ("h2o]", "not of the form"),
        ("nobody", "nobody"),
        ("h2o[sinks]", "sinks"),
        ("h2o[colour=3]", "colour"),
    ],
)
def test_other_names_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        combination(text)


def test_rows_outlive_a_cut(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = Rows(file)
    rows.add({"policy": "h2o", "length": 3, "found": [1, 2]})
    rows.add({"policy": "h2o", "length": 4, "found": [3], "refused": "no"})
    with file.open("a") as stream:
        stream.write('{"policy": "h2o", "le')
    again = Rows(file)
    assert again.of({"policy": "h2o", "length": 4}) == {"policy": "h2o", "length": 4, "found": [3], "refused": "no"}
    assert again.of({"policy": "h2o", "length": 5}) is None
    again.add({"policy": "tova", "length": 4})
    assert [json.loads(line)["policy"] for line in file.read_text().splitlines()] == ["h2o", "h2o", "tova"]
    with again.write_csv().open(newline="") as stream:
        assert list(csv.DictReader(stream))[1] == {"policy": "h2o", "length": "4", "refused": "no"}
    file.write_text('{"policy": "h2o"}\nnothing\n{}\n')
    with pytest.raises(ValueError, match="line 2"):
        Rows(file)


def test_a_grid_goes_on_where_it_was_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "words.txt", tmp_path / "out"
    text.write_text(WORDS)
    words = f"perplexity --text {text} --rows 2 --lengths 32 --policies h2o --out {out} --budgets".split()
    assert command.main([*words, "8"]) == 0
    file = out / "perplexity.jsonl"
    first = file.read_text().splitlines()
    assert command.main([*words, "8,40"]) == 0, capsys.readouterr().err
    rows: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    assert file.read_text().splitlines()[:2] == first and len(rows) == 3
    assert [row["budget"] for row in rows] == [1.0, 8, 40]
    # Where everything has room h2o is the full cache.
    assert rows[2]["nats_per_token"] == pytest.approx(rows[0]["nats_per_token"], rel=1e-4)
    assert rows[1]["nats_per_token"] != pytest.approx(rows[0]["nats_per_token"], rel=1e-4)
    assert rows[1]["cache_bytes"] < rows[0]["cache_bytes"] == rows[0]["full_cache_bytes"]
    assert rows[0]["cases"] == len(rows[0]["of_cases"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("perplexity --text NOWHERE.txt", "NOWHERE.txt is not a file"),
        ("perplexity --text {text} --policies h2o+nothing", "'nothing' is none of"),
        ("perplexity --text {text} --budgets many", "budget='many'"),
        ("perplexity --text {text} --prefix 1.0", "--prefix 1.0 is not a share"),
        ("perplexity --text {text} --lengths 1", "nothing to predict"),
        ("perplexity --text {text} --out {text}", "is a file; name a directory"),
    ],
)
def test_wrong_grids_are_refused_before_anything_is_loaded(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "load", None)
    text = tmp_path / "words.txt"
    text.write_text(WORDS)
    assert command.main(words.format(text=text).split()) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
