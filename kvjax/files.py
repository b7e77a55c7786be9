"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_aside(file: Path) -> Iterator[Path]:
    """A path to write to, which takes the file's name once everything has been written."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        yield aside
        aside.rename(file)
    finally:
        aside.unlink(missing_ok=True)
