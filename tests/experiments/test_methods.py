"""The page of all methods, from rows that are written here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments import methods
from experiments.methods import main

CASES = {
    "full": [2.0, 3.0],
    "h2o": [2.1, 3.3],
    "streaming": [2.5, 3.5],
    "fastgen": [2.0, 3.1],
    "triattention[checkpoint=d]": [2.4, 3.0],
    "triattention[checkpoint=d,keep_prompt=false]": [2.1, 3.0],
    "h2o[recent=4,sinks=1]": [2.5, 3.1],
}
"""Nats of two passages."""


def _row(policy: str, budget: float, cases: list[float]) -> dict[str, Any]:
    return {
        "model": "tiny",
        "policy": policy,
        "budget": budget,
        "cases": 2,
        "of_cases": cases,
        "nats_per_token": sum(cases) / 2,
        "agreement": 0.75,
        "cache_bytes": 10,
        "full_cache_bytes": 100,
    }


@pytest.fixture
def written(tmp_path: Path) -> str:
    """The page of rows at one budget."""
    rows = [_row(name, 1.0 if name in ("full", "fastgen") else 0.1, cases) for name, cases in CASES.items()]
    rows += [{key: value for key, value in _row("lsh_e", 0.1, [2.3, 3.3]).items() if key != "agreement"}]
    rows += [_row("h2o", 0.25, [2.0, 3.0]) | {"model": "another"}]
    rows += [{"model": "tiny", "policy": "tova", "budget": 0.1, "refused": "one clear reason"}]
    (tmp_path / "methods").mkdir()
    asked = {"family": "single", "string_match": 0.5, "string_match_of_cases": [1.0, 0.0]}
    each = [(name, budget, depth) for name, budget in (("full", 1.0), ("h2o", 0.1)) for depth in (0.5, None)]
    needles = [_row(name, budget, [2.0, 3.0]) | asked | {"depth": depth} for name, budget, depth in each]
    (tmp_path / "methods" / "retrieval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in needles))
    timed = [("full", 1.0), ("h2o", 0.25), ("streaming", 0.25)]
    times = [{"policy": name, "budget": str(budget), "time_over_first": 0.5 + budget / 2} for name, budget in timed]
    (tmp_path / "methods" / "decode.json").write_text(json.dumps({"title": "decode: two rows", "rows": times}))
    (tmp_path / "methods" / "perplexity.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["--model", "tiny", "--text", "a.txt", "--out", str(tmp_path), "--page-only"]) == 0
    assert (tmp_path / "methods" / "loss.png").exists()
    return (tmp_path / "methods.md").read_text()


def test_losses_are_means_over_passages_with_their_errors(written: str) -> None:
    assert "those of the full cache (2.5000)" in written
    assert "| ranked by attention at every token | `h2o` | +0.200 ± 0.100 | – |" in written
    assert "| ranked by attention at every token | `fastgen` | – | +0.050 ± 0.050 |" in written
    assert "| `triattention` | +0.200 ± 0.200 | – |" in written
    assert "| `triattention[keep_prompt=false]` | +0.050 ± 0.050 | – |" in written
    assert "| ranked by attention at every token | `h2o[recent=4,sinks=1]` | +0.300 ± 0.200 | – |" in written
    assert "| ranked by position | `streaming` | +0.500 ± 0.000 | – |" in written


def test_agreement_is_shown_where_it_was_measured(written: str) -> None:
    whole = written.partition("## Agreement on texts")[2].partition("## ")[0]
    assert "| `h2o` | 75.0% | – |" in whole and "| `lsh_e` | – | – |" in whole


def test_counts_answers_over_depths(written: str) -> None:
    assert "The full cache answers 50% of `single`." in written
    assert "| ranked by attention at every token | `h2o` | 2 of 4 (7% to 93%) |" in written


def test_shows_times_where_they_were_measured(written: str) -> None:
    assert "slots for 25% of the text: `decode: two rows`" in written
    assert "| ranked by attention at every token | `h2o` | 0.62 |" in written


def test_lists_what_was_left_out_and_no_other_model(written: str) -> None:
    assert "| tova | 0.1 | one clear reason |" in written
    assert "| 25% |" not in written


def test_leaves_out_what_was_not_measured(written: str, tmp_path: Path) -> None:
    assert "Facts in a long text" in written and "## Time" in written
    for name in ("retrieval.jsonl", "decode.json"):
        (tmp_path / "methods" / name).unlink()
    assert main(["--model", "tiny", "--text", "a.txt", "--out", str(tmp_path), "--page-only"]) == 0
    page = (tmp_path / "methods.md").read_text()
    assert "Facts in a long text" not in page
    assert "## Time" not in page
    assert "25%" not in page


def test_measures_other_settings_of_some_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[list[str]]()
    monkeypatch.setattr(methods, "kvjax", lambda words: calls.append(words) or 0)
    words = ["--model", "tiny", "--text", "a.txt", "--out", str(tmp_path), "--budgets", "0.1", "--length", "256"]
    assert main([*words, "--policies", "cur", "triattention", "--calibrated", "d", "--times", "0.1"]) == 0
    asked = [call[call.index("--policies") + 1] for call in calls]
    calibrated = "triattention[checkpoint=d]"
    assert asked[0] == f"cur,{calibrated},triattention[checkpoint=d,keep_prompt=false],cur[evict_every=128]"
    assert asked[1] == f"cur,{calibrated},triattention[checkpoint=d,keep_prompt=false]"
    assert asked[2:] == [f"cur,{calibrated}"] * 2
