"""Recall of planted facts, measurements that are made once, and the reports on LESS, on quality and on weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvjax
from experiments import reports, weights
from experiments.less.checkpoints import even_slots, open_shelf
from experiments.recall import recall
from experiments.store import Store
from kvjax.cli.evaluate import REPORTS, main
from kvjax.methods.less import checkpoint
from kvjax.models.fingerprint import fingerprint
from tests.methods.less.test_less import HIDDEN, kernels_for

TEXT = "Once upon a time there was a fox who told a story.\nThe story was long, and nobody knew its end.\n" * 40


@pytest.fixture(scope="module")
def tiny() -> kvjax.Model:
    return kvjax.load("tiny", dtype="float32")


def test_recall(tiny: kvjax.Model) -> None:
    text = np.asarray(tiny.tokenizer(TEXT)["input_ids"])
    settings: dict[str, Any] = dict(text=text, forms=("pair",), cases=4)
    assert recall(tiny, "full", 1.0, 50, **settings).share["pair"] > 0.5
    forgetful = recall(tiny, "window", 8, 50, **settings)
    assert forgetful.mean == 0.0 and forgetful.cache_bytes < forgetful.full_cache_bytes
    wrong: dict[str, Any]
    for wrong, message in (({"forms": ("poem",)}, "poem"), ({"length": 10**6}, "length=1000000")):
        with pytest.raises(ValueError, match=message):
            recall(tiny, "full", **(settings | wrong))


def test_store_makes_each_measurement_once(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> dict[str, list[float]]:
        made.append(1)
        return {"x": [0.5]}

    for _ in range(2):
        assert Store(tmp_path / "m.json").measure("a", {"slots": (1, 2)}, make) == {"x": [0.5]}
    assert len(made) == 1 and [file.name for file in tmp_path.iterdir()] == ["m.json"]
    assert Store(tmp_path / "m.json").stored("a", {"slots": (1, 3)}) is None
    Store(tmp_path / "m.json").measure("a", {"slots": (1, 3)}, make)
    again = Store(tmp_path / "m.json", redo=True)
    for _ in range(2):
        again.measure("a", {"slots": (1, 3)}, make)
    assert len(made) == 3
    (tmp_path / "m.json").write_text("{")
    with pytest.raises(ValueError, match="delete it"):
        Store(tmp_path / "m.json")


@pytest.fixture(scope="module")
def saved(tiny: kvjax.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kernels") / "few"
    settings = checkpoint.Settings(tiny.name, fingerprint(tiny), "h2o", {}, budget=0.05, hidden=HIDDEN)
    checkpoint.save(directory, kernels_for(tiny.config), settings)
    return directory


def copied(saved: Path, directory: Path, **changes: Any) -> str:
    """The same kernels, as if they had been made for something else."""
    shutil.copytree(saved, directory)
    settings = json.loads((saved / "settings.json").read_text())
    (directory / "settings.json").write_text(json.dumps(settings | changes))
    return str(directory)


def test_shelf_finds_the_nearest_kernels(tiny: kvjax.Model, saved: Path, tmp_path: Path) -> None:
    few, many = str(saved), copied(saved, tmp_path / "many", budget=114)
    shelf = open_shelf(tiny, [f"a={few}", many])
    assert [(k.name, k.slots) for k in shelf.kernels] == [("a", even_slots(0.05, 1152)), ("many", 114)]
    near = {slots: shelf.nearest("tova", slots) for slots in (22, 56, 114)}
    assert [k.name for k in near.values() if k] == ["a", "a", "many"] and shelf.nearest("keyformer", 56) is None
    other = copied(saved, tmp_path / "other", policy_settings={"recent": 0.25})
    for wrong, message in (([few, few], "called 'few'"), ([few, other], "recent"), (["nowhere"], "nowhere")):
        with pytest.raises(ValueError, match=message):
            open_shelf(tiny, wrong)


def test_less_report_is_written_and_resumes(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="figures need the plots extra")
    text = tmp_path / "story.txt"
    text.write_text(TEXT)
    words = ["less", "--text", str(text), "--out", str(tmp_path / "out"), "--rows", "2", "--length", "40"]
    words += ["--budgets", "0.012", "--checkpoints", f"kernels={copied(saved, tmp_path / 'kernels', budget=12)}"]
    assert main([*words, "--only", "performer"]) == 0
    first = capsys.readouterr().err.splitlines()
    measured_names = [f"perplexity: {name}, 12 slots" for name in ("h2o", "h2o performer", "less kernels on h2o")]
    assert [line.rpartition(": ")[0] for line in first] == measured_names
    assert all("nats per token, cache" in line for line in first)
    written = (tmp_path / "out" / "less.md").read_text()
    assert "performer" in written and "| not measured |" not in written and "**not measured**" in written
    measured = json.loads((tmp_path / "out" / "less" / "measurements.json").read_text())
    assert len(measured) == 3
    assert main([*words, "--only", "performer"]) == 0
    assert capsys.readouterr().err == "" and (tmp_path / "out" / "less.md").read_text() == written
    assert main([*words, "--only", "performer", "--redo"]) == 0
    assert capsys.readouterr().err.splitlines() == first


def test_quality_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="figures need the plots extra")
    text = tmp_path / "story.txt"
    text.write_text(TEXT)
    words = ["quality", "--text", str(text), "--out", str(tmp_path / "out"), "--rows", "2", "--length", "40"]
    assert main([*words, "--policies", "window,snapkv", "--budgets", "12"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out' / 'quality.md'}\n"
    written = (tmp_path / "out" / "quality.md").read_text()
    assert "| window | 12 |" in written and "snapkv at 12 is left out: sinks + recent" in written
    assert (tmp_path / "out" / "quality" / "quality.png").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budgets", "much"], "'much' is not a share"),
        (["--budgets", "0.9"], "not from 8 to half"),
        (["--checkpoints", "nowhere"], "nowhere holds no kernels"),
        (["--rows", "0"], "nothing to predict"),
        (["--text", "nowhere.txt"], "nowhere.txt is not a file"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "story.txt"
    text.write_text(TEXT)
    assert main(["less", "--text", str(text), "--out", str(tmp_path / "out"), *words]) == 2
    caught = capsys.readouterr()
    assert caught.out == "" and message in caught.err and caught.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_rounded_weights_are_compared_by_hand() -> None:
    draw = np.random.default_rng(0)
    expected, logits = draw.standard_normal((2, 5, 7)).astype(np.float32)
    tokens = draw.integers(0, 7, 5)
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (expected[:-1], logits[:-1]))
    by_hand = (
        -q[np.arange(4), tokens[1:]].mean(),
        (np.exp(p) * (p - q)).sum(-1).mean(),
        (p.argmax(-1) == q.argmax(-1)).mean(),
    )
    np.testing.assert_allclose(weights.errors_of(expected, logits, tokens), by_hand, rtol=1e-5)


@pytest.mark.slow
def test_rounding_weights_costs_little(tmp_path: Path) -> None:
    text = tmp_path / "story.txt"
    text.write_text("Once upon a time there was a little girl named Lily.\n" * 20)
    words = ["weights", "--text", str(text), "--rows", "1", "--length", "32", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    report = (tmp_path / "out" / "weights.md").read_text()
    rows = [line.split(" | ") for line in report.splitlines() if line.startswith(("| float", "| bfloat", "| int8"))]
    assert [row[0] for row in rows] == ["| float32", "| bfloat16", "| int8, float32", "| int8, bfloat16"]
    sizes, divergences = ([float(row[column].replace(",", "")) for row in rows] for column in (1, 3))
    assert sizes[3] < sizes[1] < sizes[0] and 0 == divergences[0] < divergences[2] < 0.01


def test_the_command_knows_every_report() -> None:
    assert tuple(reports.REPORTS) == REPORTS
