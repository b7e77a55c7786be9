"""What the documentation shows is there, and runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import kvjax
from tests.serving import FakeEngine, events, served

DOCS = Path(__file__).parent.parent / "docs"
API = (DOCS / "api.md").read_text(encoding="utf-8")
SERVING = (DOCS / "serving.md").read_text(encoding="utf-8")


def test_every_public_name_is_explained() -> None:
    table = API[: API.index("## Texts")]
    named = set(re.findall(r"`(\w+)", "".join(re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE))))
    assert named == set(kvjax.__all__)


@pytest.mark.slow
def test_the_code_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", API, flags=re.DOTALL)
    exec("\n".join(blocks), {})


@pytest.mark.slow
def test_an_engine_answers_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    exec(re.findall(r"```python\n(.*?)```", SERVING, flags=re.DOTALL)[1], {})
    assert "Held(seen=" in capsys.readouterr().out


def test_what_serving_shows_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    engine = FakeEngine()
    engine.model.name = "smollm2"
    with served(engine) as port:
        shown = SERVING.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{port}")
        lines = re.findall(r"^(curl (?:.*\\\n)*.*)$", shown, flags=re.MULTILINE)
        assert len(lines) == 6
        for line in lines:
            said = subprocess.run(["sh", "-c", f"{line} -sS --fail-with-body"], capture_output=True, text=True)
            assert said.returncode == 0, (line, said)
            if "/metrics" in line:
                assert "kvjax_tokens_total" in said.stdout
            elif "stream" in line:
                *chunks, last = events(iter(said.stdout.splitlines()))
                assert last == "[DONE]" and json.loads(chunks[-1])["kv"]["kept"] == 64
            else:
                json.loads(said.stdout)
        assert len(engine.requests) == 3
        example, _ = re.findall(r"```python\n(.*?)```", shown, flags=re.DOTALL)
        exec(example, {})
    assert "'kept': 64" in capsys.readouterr().out
    assert (engine.requests[-1].budget, engine.requests[-1].sampling.top_k) == (64, 40)
