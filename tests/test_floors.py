"""Imports go down, never up: what each floor may stand on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS: dict[str, tuple[str, ...]] = {
    "pallas_kernels": ("pallas_kernels",),
    "kvjax/rope.py": ("pallas_kernels",),
    "kvjax/types.py": ("kvjax.rope", "pallas_kernels"),
    "kvjax/settings.py": (),
    "kvjax/files.py": (),
    "kvjax/tokens.py": (),
    "kvjax/models": (
        "kvjax.models",
        "kvjax.rope",
        "kvjax.types",
        "kvjax.settings",
        "kvjax.files",
        "pallas_kernels",
    ),
}


def _imported(file: Path) -> Iterator[str]:
    """The modules of this repository that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            # `from kvjax import policies` imports a module of kvjax.
            root = node.module in ("kvjax", "pallas_kernels")
            names = [f"{node.module}.{alias.name}" if root else str(node.module) for alias in node.names]
        yield from (name for name in names if name.split(".")[0] in ("kvjax", "pallas_kernels", "tests"))


@pytest.mark.parametrize("floor", FLOORS)
def test_imports_go_down(floor: str) -> None:
    path = ROOT / floor
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert files
    for file in files:
        for name in _imported(file):
            allowed = any(f"{name}.".startswith(f"{below}.") for below in FLOORS[floor])
            assert allowed, f"{file.relative_to(ROOT)} imports {name}, which is not below {floor}"
