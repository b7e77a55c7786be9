"""What the benchmark of the server tells is what became of its requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import serving
from kvjax.cli import bench
from kvjax.serving.requests import Request
from tests.fake_engine import FakeEngine


def test_everyone_who_asks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = FakeEngine()
    engine.reset()
    found: list[serving.Client] = []
    wanted = [(Request((1, 2), max_tokens=number), None) for number in (3, 5, 1, 4)]
    serving.ask(engine, wanted, 2, found.append)
    assert sorted(len(client.tokens) for client in found) == [1, 3, 4, 5]
    assert all(client.finished is not None and client.seconds > 0 for client in found)


def test_who_leaves_is_told_no_more() -> None:
    engine: Any = FakeEngine()
    engine.reset()
    engine.delay = 0.01
    found: list[serving.Client] = []
    serving.ask(engine, [(Request((1, 2), max_tokens=400), 2)], 1, found.append)
    [client] = found
    assert client.finished is not None and client.finished.reason == "cancelled" and 2 <= len(client.tokens) < 100


@pytest.mark.slow
def test_the_page_tells_what_was_measured(tmp_path: Path) -> None:
    words = ["serving", "--requests", "60", "--repeats", "1", "--out", str(tmp_path)]
    assert bench.main(words) == 0
    endured = json.loads((tmp_path / "serving.json").read_text())["tiny: endurance"]["result"]
    assert endured["lost"] == endured["compilations"] == 0
    assert endured["answers"]["whole"] + endured["answers"]["left"] == 60
    page = (tmp_path / "serving.md").read_text()
    assert "60 requests on 16 rows" in page and page.count("| served, 16 rows | 1.00 |") == 2
    assert bench.main(words) == 0 and (tmp_path / "serving.md").read_text() == page
