"""Policies and budgets to compare, and files of rows: one measurement on one case as a line of JSON."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvjax import methods
from kvjax.methods.notation import compared
from kvjax.model import Model
from kvjax.models.fingerprint import fingerprint
from kvjax.policies.codec import Codec
from kvjax.policies.policy import Policy
from kvjax.policies.quantizer import Int4, Int8
from kvjax.types import setting_names
from kvjax.utils.fields import directories
from kvjax.utils.files import append_line, expanded, read_text, write_text, written_aside
from kvjax.utils.settings import parse_budget

Cell = dict[str, Any]
"""Fields that identify a row, fit for JSON; all rows of a file have the same field names."""


class Entry(NamedTuple):
    """A policy as the command line names it, and a budget."""

    label: str
    policy: Policy
    budget: int | float

    @property
    def sources(self) -> list[Path]:
        """Files of which the policy is made: FILE.py:NAME in the label, and those of directories in settings."""
        files: list[Path] = []
        for text in re.findall(r"[^,\[\]]+?\.py(?=:)", self.label):
            # A plus or an equals sign may be part of a path, or end what is before it.
            starts = [0, *(sign.end() for sign in re.finditer(r"[+=]", text))]
            files += [file for start in starts if (file := expanded(text[start:])).is_file()][:1]
        for text in directories(self.policy):
            files += sorted(file for file in expanded(text).rglob("*") if file.is_file())
        return files

    def cell(self, model: Model) -> Cell:
        """Return the fields of the policy, the budget and the model that identify a row."""
        content = b"".join(file.read_bytes() for file in self.sources)
        source = {"source": digest(content)} if self.sources else {}
        return {
            "model": model.name,
            "fingerprint": fingerprint(model),
            "dtype": str(model.weights.dtype),
            "policy": self.label,
            "parts": describe(self.policy) | source,
            "budget": self.budget,
        }


def digest(content: bytes) -> str:
    """Return twelve hex digits of the hash of a file's content; its rows are measured again when it changes."""
    return hashlib.sha256(content).hexdigest()[:12]


def describe(policy: Policy) -> dict[str, Any]:
    """Return a policy's name and settings, JSON-serializable; with a residual, `base` has those of the base policy.

    Parts that differ from those of the name and its settings are included.
    """
    base = dataclasses.replace(policy, residual=None)
    name, settings = methods.name_of(base), methods.settings_in(base)
    fields: dict[str, Any] = {"name": name} | _plain(settings)
    if name in methods.REGISTRY:
        preset = methods.policy(name, **settings)
        for part in ("plan", "codec", "selection"):
            if getattr(base, part) != getattr(preset, part):
                fields[part] = _describe_part(getattr(base, part))
    if policy.residual is None:
        return fields
    kind = type(policy.residual)
    kind_name = next((name for name, residual in methods.RESIDUALS.items() if residual is kind), kind.__name__)
    return {"name": kind_name} | _settings(policy.residual) | {"base": fields}


def _describe_part(part: Any) -> dict[str, Any]:
    # Rows measured before there were other quantizers have the bits of integer codes.
    fields = {"kind": type(part).__name__} | _settings(part)
    if isinstance(part, Codec) and part.quantized:
        has_bits = type(part.quantizer) in (Int8, Int4)
        fields |= {"bits": part.bits} if has_bits else {"quantizer": _describe_part(part.quantizer)}
    return fields


def _settings(part: Any) -> dict[str, Any]:
    return _plain({name: getattr(part, name) for name in setting_names(part)})


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in settings.items() if isinstance(value, (int, float, str, tuple, list))}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}


def entries(
    names: str, budgets: str, parts: Mapping[str, str | None] | None = None, settings: Mapping[str, Any] | None = None
) -> list[Entry]:
    """Return the entries that a grid compares: each policy at each budget, the full cache first.

    Args:
        names: policies of `kvjax.methods.notation.combination`, separated by commas.
        budgets: slots or fractions, separated by commas; policies that choose their own or have none get 1.0.
        parts: parts of all policies but the full cache.
        settings: settings of all policies that have them.
    """
    sizes = list(dict.fromkeys(parse_budget(text) for text in budgets.split(",")))
    full = Entry("full", methods.policy("full"), 1.0)
    return [full] + [
        Entry(label, policy, budget)
        for label, policy in compared(names, parts or {}, settings or {}).items()
        if label != "full"
        for budget in (sizes if policy.plan.sizing.mode == "budget" else [1.0])
    ]


class RowFile:
    """Rows in a file of JSON lines; each new row is appended as soon as it is measured.

    Args:
        file: created with the first row.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rows: list[dict[str, Any]] = []
        text = read_text(file) if file.exists() else ""
        *lines, cut = text.split("\n")
        for number, line in enumerate(lines, 1):
            try:
                self.rows.append(dict(json.loads(line)))
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(
                    f"{file}, line {number}, is no row ({error}); delete it or name another directory."
                ) from None
        if cut:  # the process ended while it wrote this line
            write_text(file, "".join(f"{line}\n" for line in lines))

    def of(self, cell: Cell) -> dict[str, Any] | None:
        """Return the row of a cell, or None."""
        stored = json.loads(json.dumps(cell))
        return next((row for row in self.rows if all(row.get(name) == value for name, value in stored.items())), None)

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        """Append a row to the file and return it as stored."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(row)
        self.rows.append(json.loads(line))
        append_line(self.file, line)
        return self.rows[-1]

    def write_csv(self) -> Path:
        """Write the same rows as CSV, without lists and objects, and return its path."""
        file = self.file.with_suffix(".csv")
        shown = [{n: v for n, v in row.items() if not isinstance(v, (list, dict))} for row in self.rows]
        with written_aside(file) as aside, aside.open("w", newline="", encoding="utf-8") as stream:
            table = csv.DictWriter(stream, list(dict.fromkeys(name for row in shown for name in row)))
            table.writeheader()
            table.writerows(shown)
        return file
