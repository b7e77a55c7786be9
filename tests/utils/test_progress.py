"""Progress on standard error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvjax.utils.progress import Bar, time_left
from tests.paths import ROOT


def test_updates_without_a_terminal_are_seldom_unless_forced(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("epochs", 4, done=1) as bar:
        for epoch in (2, 3):
            bar.update(epoch, f"loss {epoch}")
        bar.update(4, "loss 4", force=True)
    first, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\[2/4, \d+ s left\] loss 2", first) and last == "[4/4] loss 4"


@pytest.mark.parametrize(
    ("work", "text"),
    [((0, 5, 9.0), ""), ((5, 0, 9.0), ""), ((2, 4, 9.0), ", 18 s left"), ((1, 9, 60.0), ", 9 min left")],
)
def test_time_left(work: tuple[int, int, float], text: str) -> None:
    assert time_left(*work) == text


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_results_go_into_a_file_while_a_terminal_shows_the_bar(tmp_path: Path) -> None:
    script = "from kvjax.utils.progress import Bar\nwith Bar('lines', 2):\n    print('result')"
    terminal, slave = os.openpty()
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", script], stdout=out, stderr=slave, cwd=ROOT, check=True)
    os.close(slave)
    shown = os.read(terminal, 10_000).decode()
    os.close(terminal)
    assert "lines" in shown and "result" not in shown
    assert (tmp_path / "out").read_text() == "result\n"
