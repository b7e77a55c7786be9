"""The benchmark of 8-bit weights measures both ways of decoding."""

from __future__ import annotations

import pytest

from kvjax.cli import bench


@pytest.mark.slow
def test_the_table_has_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["weights", "--model", "tiny", "--rows", "1,2", "--new-tokens", "2", "--repeats", "1"]
    assert bench.main(words) == 0
    lines = [line.split(" | ")[:2] for line in capsys.readouterr().out.splitlines() if line.startswith(("| 1", "| 2"))]
    assert lines == [[f"| {rows}", way] for rows in (1, 2) for way in ("one at a time", "in one program")]
