"""Traces: which tokens left at which step, what scored how, and how much of the full cache's attention stayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cli.main import main
from kvjax.evaluation import trace as module
from kvjax.evaluation.trace import trace
from tests.small_models import GQA, random_model

TEXT = np.random.default_rng(3).integers(0, GQA.vocab_size, 40).tolist()
PROMPT, WRITTEN = TEXT[:24], TEXT[24:]


@pytest.mark.parametrize(("name", "settings"), [("h2o", {}), ("keydiff", {"block": None, "positions": "cache"})])
def test_a_trace_is_what_the_steps_hold(name: str, settings: dict[str, Any]) -> None:
    model, policy = random_model(GQA), kvjax.policy(name, recent=4, **settings)
    found = trace(model, policy, PROMPT, WRITTEN, 10)
    state, _ = kvjax.prefill(model, policy, [PROMPT], 10, max_new_tokens=len(WRITTEN))
    for entry in range(1 + len(WRITTEN)):
        for layer, held in enumerate(kvjax.held_positions(state)):
            assert np.sort(found.positions[layer][0, :, entry]).tolist() == np.sort(held[0]).tolist()
        if entry < len(WRITTEN):
            state, _ = kvjax.decode_step(state, [WRITTEN[entry]])
    lost = found.evicted(0, 0, 0)
    assert len(lost[0]) == 14 and all(len(entry) == 1 for entry in lost[1:])
    slots, score = found.positions[0][0, 0], found.scores[0][0, 0]
    for entry, (gone,) in enumerate(lost[1:]):
        old = slots[entry] <= len(PROMPT) + entry - 4  # protected otherwise
        at = int(np.flatnonzero(slots[entry] == gone)[0])
        assert score[entry, at] == score[entry, old & (slots[entry] >= 0)].min()


def test_attention_is_kept_whole_or_in_part(x64: None) -> None:
    model = random_model(GQA, dtype=jnp.float64)
    whole = trace(model, "h2o", PROMPT, WRITTEN, 40)
    np.testing.assert_allclose(whole.attention_kept, 1.0, atol=1e-6)
    window = trace(model, "window", PROMPT, WRITTEN, 10)
    assert (window.attention_kept < 1.0).all() and (window.attention_kept > 0.0).all() and (window.live == 10).all()
    expected = [list(range(14)), *([14 + step] for step in range(len(WRITTEN)))]
    assert window.evicted(1, 0, 1) == expected


@pytest.mark.parametrize("words", [["--policy", "h2o"], ["--policy", "h2o", "--plan", "adakv"]])
def test_the_command_writes_json(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, text = tmp_path / "trace.json", "Once upon a time there was a girl who went to the park"
    settings = ["--budget", "8", "--max-new-tokens", "6", "--temperature", "0", "--trace", str(file)]
    assert main(["generate", "--prompt", text, *words, *settings]) == 0
    made = json.loads(file.read_text())
    assert made["policy"].startswith("h2o") and made["budget"] == 8
    for layer in made["layers"]:
        assert np.shape(layer["attention_kept"]) == np.shape(layer["live_slots"]) and len(layer["evicted"][0]) == 7
        assert sum(head[-1] for head in layer["live_slots"]) == 8 * len(layer["live_slots"])
    assert f"wrote a trace of 6 new tokens to {file}" in capsys.readouterr().err
    picture = tmp_path / "trace.gif"
    assert main(["generate", "--prompt", text, "--trace", str(picture)]) == 2
    assert "is neither .json nor .png" in capsys.readouterr().err and not picture.exists()


def test_ticks_of_a_picture_are_whole_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(module, "save_figure", lambda figure, file: figures.append(figure))
    positions = tuple(np.zeros((1, 1, 4, 2), int) for _ in range(2))
    scores, kept = tuple(np.zeros((1, 1, 4, 2)) for _ in range(2)), np.ones((2, 1, 1, 4))
    module.save(module.Trace(positions, scores, kept), tmp_path / "trace.png", {"policy": "h2o"})
    (figure,) = figures
    figure.canvas.draw()
    for panel in figure.axes[:2]:
        ticks = [*panel.get_xticks(), *panel.get_yticks()]
        assert ticks == [round(tick) for tick in ticks]
