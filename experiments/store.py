"""Measurements outside of grids, each made once and kept in a JSON file."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvjax.utils.compilation import drop_programs
from kvjax.utils.files import write_text


class Store:
    """Measurements by name in one JSON file; equal settings are measured only once.

    Args:
        file: created with the first measurement.
        redo: True to measure again instead of reading from the file.
        show: called with a line after each measurement.

    Raises:
        ValueError: the file exists and holds something else.
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
        """Return a measurement made with these settings, or None."""
        kept = self._kept.get(name)
        return kept["result"] if kept and kept["settings"] == json_round_trip(settings) else None

    def results(self) -> dict[str, Any]:
        """Return all measurements, with any settings."""
        return {name: kept["result"] for name, kept in self._kept.items()}

    def measure(self, name: str, settings: dict[str, Any], make: Callable[[], Any]) -> Any:
        """Return a measurement from the file, or make it.

        Args:
            name: its name in the file.
            settings: everything that it depends on, JSON-serializable.
            make: function that returns the measurement, JSON-serializable.
        """
        found = self.stored(name, settings)
        if found is not None and not (self.redo and name not in self._fresh):
            return found
        drop_programs()
        self._kept[name] = {"settings": json_round_trip(settings), "result": json_round_trip(make())}
        self.show(f"{name}: {brief(self._kept[name]['result'])}")
        self._fresh.add(name)
        write_text(self.file, json.dumps(dict(sorted(self._kept.items())), indent=1) + "\n")
        return self._kept[name]["result"]


def open_store(options: argparse.Namespace, report: str) -> Store:
    """Return the measurements of a report, printed to standard error as they are made."""
    file = options.out / report / "measurements.json"
    return Store(file, options.redo, lambda line: print(line, file=sys.stderr))


def brief(result: Any) -> str:
    """Return a measurement as a short text: its number, or the mean of its rows and the bytes of the cache."""
    if isinstance(result, (int, float)):
        return f"{result:.4g}"
    if not isinstance(result, dict) or "rows" not in result:
        return "done"
    found = f"{statistics.fmean(result['rows']):.4g} nats per token"
    if "cache_bytes" in result:
        found += f", cache {result['cache_bytes'] / result['full_cache_bytes']:.0%} of a full one"
    return found


def json_round_trip(value: Any) -> Any:
    """Return a value as JSON restores it."""
    return json.loads(json.dumps(value))
