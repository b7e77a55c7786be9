"""Progress on standard error."""

from __future__ import annotations

import re

import pytest

from kvjax.utils.progress import Bar


def test_updates_without_a_terminal_are_seldom_unless_forced(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("epochs", 4, done=1) as bar:
        for epoch in (2, 3):
            bar.update(epoch, f"loss {epoch}")
        bar.update(4, "loss 4", force=True)
    first, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\[2/4, \d+ s left\] loss 2", first) and last == "[4/4] loss 4"
