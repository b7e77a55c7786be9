"""What the documentation shows is there, and runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvjax

API = (Path(__file__).parent.parent / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_public_name_is_explained() -> None:
    table = API[: API.index("## Texts")]
    named = set(re.findall(r"`(\w+)", "".join(re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE))))
    assert named == set(kvjax.__all__)


@pytest.mark.slow
def test_the_code_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", API, flags=re.DOTALL)
    exec("\n".join(blocks), {})
