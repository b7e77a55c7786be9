"""FastGen's report is written from what was measured, once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvjax.cli import evaluate

TEXT = 'Once upon a time there was a fox. It said: "Who is there?"\nThe story was long, and nobody knew its end.\n' * 40


@pytest.mark.slow
def test_the_report_has_tables_claims_and_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "fox.txt"
    file.write_text(TEXT)
    words = ["fastgen", "--text", str(file), "--out", str(tmp_path), "--rows", "2", "--length", "80", "--prefix", "48"]
    words += [
        "--thresholds",
        "0.7",
        "--ablated",
        "0.7",
        "--recall",
        "--only",
        "choices",
        "stability",
        "quality",
        "profiling",
    ]
    assert evaluate.main(words) == 0
    report = (tmp_path / "fastgen.md").read_text()
    for heading in ("Choices (Figure 3)", "Stability (Figure 4)", "Quality against bytes", "Profiling time (Table 3)"):
        assert f"## {heading}" in report
    assert "| full | – | 100.0% |" in report and "frequent+local" in report
    for name in ("choices", "stability", "quality"):
        assert (tmp_path / "fastgen" / f"{name}.png").stat().st_size > 1000
    kept = json.loads((tmp_path / "fastgen" / "measurements.json").read_text())
    assert evaluate.main(words) == 0
    assert json.loads((tmp_path / "fastgen" / "measurements.json").read_text()) == kept


def test_a_prefix_that_leaves_no_room_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fox.txt").write_text(TEXT)
    words = ["fastgen", "--text", str(tmp_path / "fox.txt"), "--length", "80", "--prefix", "60"]
    assert evaluate.main([*words, "--out", str(tmp_path)]) == 2
    assert "--prefix 60" in capsys.readouterr().err
