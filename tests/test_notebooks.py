"""Every notebook runs from top to bottom on a CPU, and none carries outputs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cases import slow

FILES = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert {"quickstart", "write_a_policy", "memory_vs_quality", "train_less"} <= {file.stem for file in FILES}


@pytest.mark.parametrize(
    "file",
    [slow(file) if file.stem in ("memory_vs_quality", "train_less") else file for file in FILES],
    ids=lambda file: file.stem,
)
def test_runs(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient, *_ = (
        pytest.importorskip(package, reason="running notebooks needs the notebooks extra")
        for package in ("nbformat", "nbclient", "ipykernel", "matplotlib")
    )
    notebook = nbformat.read(file, as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells), "clear the outputs"
    assert "google.colab" in notebook.cells[0].source
    paths = [str(file.parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # compiling takes most of the time
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": file.parent}}
    ).execute()
