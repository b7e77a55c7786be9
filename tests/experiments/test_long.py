"""Text far beyond the trained length, on the embedded model and a few slots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvjax
from experiments.long import in_windows
from kvjax import generate
from kvjax.cli import evaluate


def stories(model: kvjax.Model, rows: int, tokens: int) -> str:
    """Text that the model wrote with a full cache, each story within the trained length."""
    settings: dict[str, Any] = dict(max_new_tokens=tokens, policy="full", seed=list(range(rows)), stop_at_eos=False)
    return "\n".join(model.generate(["Once upon a time"] * rows, **settings))


@pytest.mark.parametrize(
    "slots, length, rows, tokens",
    [(64, 3001, 8, 420), pytest.param(256, 20_001, 21, 1100, marks=pytest.mark.slow)],
)
def test_perplexity_stays_as_low_as_within_the_trained_length(
    slots: int, length: int, rows: int, tokens: int, tmp_path: Path
) -> None:
    model = kvjax.load("tiny")
    assert length > 2 * model.config.max_positions
    (tmp_path / "stories.txt").write_text(stories(model, rows, tokens), encoding="utf-8")
    words = ["long", "--text", str(tmp_path / "stories.txt"), "--out", str(tmp_path), "--length", str(length)]
    assert evaluate.main([*words, "--policies", "streaming", "--budget", str(slots)]) == 0
    measured = json.loads((tmp_path / "long" / "measurements.json").read_text())
    nats = np.array(measured["streaming"]["result"]["stories"])
    assert len(nats) == (length - 1) // 1000 and np.isfinite(nats).all()
    # Stories differ; a cache that lost its place would cost a nat and more.
    assert nats.max() < nats[0] + 0.4
    assert "| 2,001 to 3,000 |" in (tmp_path / "long.md").read_text()


def test_the_command_line_writes_beyond_the_trained_length(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt", "Once upon a time", "--policy", "streaming", "--budget", "64", "--json"]
    assert generate.main([*words, "--ignore-eos", "--max-new-tokens", "1300"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["new_tokens"] == 1300 > kvjax.load("tiny").config.max_positions
    assert report["cache_bytes"] < report["full_cache_bytes"] / 10


def test_windows_are_means_of_what_there_is() -> None:
    np.testing.assert_array_equal(in_windows(np.arange(10.0).reshape(2, 5), 2), [3.0, 5.0, 6.5])
