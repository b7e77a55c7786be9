"""The benchmark runs and says what it measured; how fast is not a test's business."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvjax.cli import bench


@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_bench_prints_a_table_and_writes_numbers(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "numbers.json"
    words = f"{what} --model tiny --policies streaming,h2o --budgets 0.5 --batch 2 --prompt-tokens 40 --new-tokens 4"
    assert bench.main([*words.split(), "--repeats", "1", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["policy"] for row in rows] == ["full", "streaming", "h2o"]
    assert all(row["milliseconds"] > 0 for row in rows)
    assert "streaming" in capsys.readouterr().out


def test_a_policy_that_does_not_fit_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "numbers.json"
    words = (
        f"prefill --model tiny --budgets 8 --batch 1 --prompt-tokens 16 --repeats 1 --json {file} --policies".split()
    )
    assert bench.main([*words, "snapkv,streaming"]) == 0
    assert [row["policy"] for row in json.loads(file.read_text())["rows"]] == ["full", "streaming"]
    assert "snapkv at 8 is left out: sinks + recent" in capsys.readouterr().err
    assert bench.main([*words, "snapkv"]) == 2
    assert "no policy is left to benchmark" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_transformers_are_timed_without_names_that_they_drop(what: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install 'kvjax[parity]'")
    file = tmp_path / "numbers.json"
    words = f"{what} --model tiny --policies full --batch 2 --prompt-tokens 16 --new-tokens 2 --repeats 1 --json {file}"
    assert bench.main([*words.split(), "--against", "transformers"]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["policy"] for row in rows] == ["full", "transformers"] and rows[1]["milliseconds"] > 0


def test_parts_of_a_step_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "numbers.json"
    words = "parts --model tiny --policy full --prompt-tokens 20 --new-tokens 2 --repeats 2 --json"
    assert bench.main([*words.split(), str(file)]) == 0
    rows = {row["part"]: row["milliseconds"] for row in json.loads(file.read_text())["rows"]}
    inside = [rows[part] for part in ("layers without a cache", "unembedding", "cache and attention")]
    assert sum(inside) == pytest.approx(rows["a step"]) and len(rows) == 7
    assert "unembedding" in capsys.readouterr().out
    assert bench.main(["parts", "--batch", "0"]) == 2
    assert "--batch=0 is not a whole number" in capsys.readouterr().err


@pytest.mark.slow
def test_fastgen_races_at_the_slots_that_it_takes(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    words = "decode --model tiny --policies fastgen,h2o --budgets same --set threshold=0.5 --prompt-tokens 40 --batch 2"
    assert bench.main([*words.split(), "--new-tokens", "4", "--repeats", "1", "--json", str(file)]) == 0
    _, fastgen, h2o = json.loads(file.read_text())["rows"]
    assert fastgen["budget"] == f"own: {h2o['budget']}" and fastgen["cache_bytes"] < 1.5 * h2o["cache_bytes"]
    words = "decode --model tiny --policies h2o,fastgen --budgets same --prompt-tokens 8 --batch 1"
    assert bench.main([*words.split()]) == 2


@pytest.mark.slow
def test_parts_race_with_every_policy(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    words = "decode --model tiny --policies h2o,keyformer --budgets 8 --prompt-tokens 40 --batch 2 --new-tokens 4"
    words += " --codec int8 --residual less --set residual.kernels=performer --repeats 1"
    sizes = {}
    for more in ([], ["--codec", "plain"]):
        assert bench.main([*words.split(), *more, "--json", str(file)]) == 0
        _, *rows = json.loads(file.read_text())["rows"]
        assert [row["policy"] for row in rows] == ["h2o", "keyformer"]
        sizes[bool(more)] = [row["cache_bytes"] for row in rows]
    assert all(coded < plain for coded, plain in zip(sizes[False], sizes[True], strict=True))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--policies nope", "no policy 'nope'"),
        ("--policies h2o,nope", "no policy 'nope'"),
        ("--set colour=3", "--set colour: none of the policies streaming,h2o has this setting"),
        ("--policies h2o --set recent=much", "recent='much'"),
        ("--codec int3", "int3"),
        ("--budgets much", "budget='much'"),
        ("--budgets same", "name fastgen first"),
        ("--batch 0", "--batch 0 is not a whole number from 1"),
        ("--prompt-tokens -1", "--prompt-tokens -1 is not"),
        ("--repeats 0", "--repeats 0 is not"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_loaded(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["decode", "--model", "nowhere", *words.split()]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
