"""The kernels' benchmark runs unattended and says what it measured; how fast is not a test's business."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvjax.cli import bench
from kvjax.cli import bench_kernels as kernels

SMALL = "--repeats 1 --batch 1 --slots 64 --kv-heads 2 --groups 2 --head-width 16 --prompt-tokens 64"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pallas_kernels.benchmark.LEAST", 0.0)


def test_it_races_every_operation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "numbers.json"
    assert bench.main(["kernels", *SMALL.split(), "--json", str(file)]) == 0
    tables = json.loads(file.read_text())["tables"]
    names = [table["title"].split(":")[0] for table in tables]
    assert names == [
        "decode_attention",
        "paged_attention",
        "evict",
        "fused_decode",
        "hamming",
        "prefill_attention",
        "rope",
        "less_memory",
    ]
    for table in tables:
        first, *rows = table["rows"]
        assert (first["op"], first["share_of_copy"]) == ("copy", 1.0)
        assert all(row["milliseconds"] > 0 and row["bytes_per_second"] > 0 for row in rows)
        assert all(row["time_over"]["xla"] == 1 for row in rows if row["implementation"] == "xla")
    assert "jax.nn" in tables[0]["rows"][1]["time_over"]
    assert "Gumbel scores, rank 8" in capsys.readouterr().out


def test_who_fails_is_named_and_left_out_and_who_differs_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise RuntimeError("at 28:10:\n    x = y\nno such field\n")

    runners = [
        kernels.Runner("op", "inputs", "xla", lambda: np.array([1.0, -np.inf])),
        kernels.Runner("op", "inputs", "pallas", lambda: np.array([1.5, -np.inf])),
        kernels.Runner("op", "inputs", "triton", fail),
    ]
    able = kernels.run_in_turn(runners, repeats=2)
    assert [(runner.name, runner.error, len(runner.seconds)) for runner in able] == [("xla", 0, 2), ("pallas", 0.5, 2)]
    assert "op inputs, triton is left out: at 28:10: ... no such field\n" in capsys.readouterr().err


@pytest.mark.slow
def test_it_races_whole_steps_with_less_and_without(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    words = f"kernels {SMALL} --step --step-batch 2 --step-slots 32 --json {file}"
    assert bench.main(words.split()) == 0
    rows = json.loads(file.read_text())["tables"][0]["rows"]
    assert [row["policy"] for row in rows] == ["streaming", "less on streaming", "h2o", "less on h2o"]
    assert rows[1]["time_over_streaming"] > 0


def test_an_unknown_operation_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["kernels", "--ops", "decode,sort"]) == 2
    assert (
        "there is no operation 'sort' to benchmark; choose from decode, paged, evict, step, hamming"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["--batch", "--slots", "--kv-heads", "--groups", "--head-width", "--repeats"])
def test_sizes_are_from_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for size in ("0", "-3"):
        assert kernels.main([name, size]) == 2
        assert capsys.readouterr().err.startswith(f"kvjax bench kernels: {name}={size} is not a whole number from 1 to")


def test_there_is_no_other_type_of_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        kernels.main(["--dtype", "float8"])
    assert "--dtype 'float8' is not known; did you mean float32?" in capsys.readouterr().err
