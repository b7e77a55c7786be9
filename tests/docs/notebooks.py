"""Notebooks from a clean kernel: `python -m tests.docs.notebooks FILE...` runs them and stores what they show."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.paths import ROOT

FILES = sorted((ROOT / "notebooks").glob("*.ipynb"))


def run(file: Path, without: str = "", **environment: str) -> Any:
    """A notebook after all of its cells have run in order in a new kernel.

    Args:
        file: the notebook.
        without: tag of cells that are left out.
        environment: variables of the kernel beside those of this process.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    import nbclient
    import nbformat

    notebook = nbformat.read(file, as_version=4)
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    client = nbclient.NotebookClient(
        notebook,
        timeout=900,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        skip_cells_with_tag=without,
        resources={"metadata": {"path": file.parent}},
    )
    return client.execute(env=os.environ | {"PYTHONPATH": paths} | environment)


def store(file: Path) -> None:
    """Run a notebook and write it back with what it shows, and with nothing that tells of this machine."""
    import nbformat

    notebook = run(file)
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, file)


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:] or FILES):
        store(file)
