"""Cache of compiler results on disk. Each compiler compiles each program once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

Kind = Literal["kernels", "steps"]

LONGEST = 3600.0
"""Upper bound in seconds for any estimate; larger values are the compiler's mark for unknown costs."""


class Rows:
    """The rows of one chip in a JSON file.

    Args:
        file: path of the file, created with the first row.

    Raises:
        ValueError: the file is there and holds something else.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.kept: dict[str, dict[str, dict[str, Any]]] = {"kernels": {}, "steps": {}}
        if file.exists():
            try:
                self.kept |= json.loads(file.read_text(encoding="utf-8"))
            except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
                raise ValueError(f"{file} is no file of rows ({error}); delete it or name another --out.") from None

    def get(self, kind: Kind, name: str, compiler: str) -> dict[str, Any] | None:
        """Return a row that this compiler made, or None."""
        row = self.kept[kind].get(name)
        return row if row is not None and row["compiler"] == compiler else None

    def put(self, kind: Kind, name: str, row: dict[str, Any]) -> None:
        """Store a row atomically: an interruption leaves the file unchanged.

        Raises:
            ValueError: its estimate makes no sense.
        """
        seconds = row.get("estimate", 0.0)
        if not 0 <= seconds <= LONGEST:
            raise ValueError(
                f"the estimate of {name} is {seconds:.3g} s, and none is over {LONGEST:.0f}: see which of its fusions "
                "has no cost model, and have read_module leave that out."
            )
        self.kept[kind][name] = row
        self.file.parent.mkdir(parents=True, exist_ok=True)
        aside = self.file.with_suffix(".tmp")
        parts: list[str] = []
        for which, rows in self.kept.items():  # a line for each, for readable diffs
            lines = (f"{json.dumps(each)}: {json.dumps(rows[each])}" for each in sorted(rows))
            parts.append(f'"{which}": {{\n' + ",\n".join(lines) + "\n}")
        aside.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")
        aside.replace(self.file)
