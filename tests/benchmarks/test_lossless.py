"""The benchmark of lossless decoding races drafts against the full cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvjax.cli import bench


@pytest.mark.slow
def test_the_table_has_a_row_for_each_race(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little dragon. " * 40)
    words = ["lossless", "--model", "tiny", "--text", str(text), "--lengths", "60", "--rows", "1,2", "--stride", "10"]
    assert bench.main([*words, "--new-tokens", "40", "--draft-tokens", "2,2+refresh,auto"]) == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| 60")]
    choices = "2", "2+refresh", "auto"
    assert [[line[1], line[3]] for line in lines] == [[rows, drafts] for rows in "12" for drafts in choices]
    assert all(float(line[-1].rstrip(" |")) > 0 for line in lines)
