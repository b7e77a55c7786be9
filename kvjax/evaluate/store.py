"""Measurements kept on disk, each made once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvjax.compilation import drop_programs
from kvjax.files import write_text


class Store:
    """Measurements by name in one JSON file; one that was made with the same settings is not made again.

    Args:
        file: where they are; made with the first measurement.
        redo: measure again whatever is asked for.
        show: called with a line for each measurement.

    Raises:
        ValueError: the file is there and holds something else.
    """

    def __init__(self, file: Path, redo: bool = False, show: Callable[[str], None] = lambda line: None) -> None:
        self.file, self.redo, self.show = file, redo, show
        self._fresh: set[str] = set()
        self._kept: dict[str, Any] = {}
        if file.exists():
            try:
                self._kept = json.loads(file.read_text(encoding="utf-8"))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{file} is no file of measurements ({error}); delete it or name another.") from None

    def stored(self, name: str, settings: dict[str, Any]) -> Any | None:
        """A measurement made with these settings, or None."""
        kept = self._kept.get(name)
        return kept["result"] if kept and kept["settings"] == plain(settings) else None

    def results(self) -> dict[str, Any]:
        """All measurements, whatever their settings."""
        return {name: kept["result"] for name, kept in self._kept.items()}

    def measure(self, name: str, settings: dict[str, Any], make: Callable[[], Any]) -> Any:
        """A measurement, made now unless it is there.

        Args:
            name: what it is called in the file.
            settings: everything that it depends on, fit for JSON.
            make: returns it, fit for JSON.
        """
        found = self.stored(name, settings)
        if found is not None and not (self.redo and name not in self._fresh):
            return found
        self.show(name)
        drop_programs()
        self._kept[name] = {"settings": plain(settings), "result": plain(make())}
        self._fresh.add(name)
        write_text(self.file, json.dumps(dict(sorted(self._kept.items())), indent=1) + "\n")
        return self._kept[name]["result"]


def plain(value: Any) -> Any:
    """A value as JSON gives it back."""
    return json.loads(json.dumps(value))
