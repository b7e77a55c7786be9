"""Print the versions, devices, settings and caches of this machine, for an issue."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import jax

from kvjax.cli.commands import Parser, finish
from kvjax.utils.autotune import verdicts_file
from kvjax.utils.compilation import cache_directory, version
from kvjax.utils.platforms import platform_failure

BACKENDS = ("jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin")
"""Packages that jax runs on and kvjax does not require."""
WORKSHOP = ("docs", "notebooks", "page", "parity", "test")
"""Extras that do not change what kvjax does."""
PREFIXES = ("KVJAX_", "JAX_", "XLA_", "HF_", "CUDA_VISIBLE", "TPU_", "LIBTPU_")
"""Prefixes of the environment variables that change what kvjax does."""


def environment() -> dict[str, Any]:
    """Return the versions, devices, settings and caches of this machine, without access tokens."""
    return {
        "kvjax": version(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.platform()}, {os.cpu_count()} cores",
        "packages": _packages(),
        "devices": _devices(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(PREFIXES) and not name.endswith(("TOKEN", "KEY"))
        },
        "caches": {"compiled programs": _size(cache_directory()), "verdicts on kernels": _size(verdicts_file())},
    }


def _packages() -> dict[str, str]:
    try:
        required = importlib.metadata.requires("kvjax") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        required = ["jax", "flax", "numpy", "optax", "orbax-checkpoint", "transformers"]
    used = (spec for spec in required if not any(f'extra == "{name}"' in spec.replace("'", '"') for name in WORKSHOP))
    names = {re.split(r"[^\w.-]", spec, maxsplit=1)[0] for spec in used}
    versions: dict[str, str] = {}
    for name in sorted(names | set(BACKENDS)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _devices() -> list[str]:
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # a plugin without its driver, a TPU that another process holds
        return [f"none: {platform_failure(error) or ' '.join(str(error).split())}"]
    lines = [f"{jax.default_backend()}: {' '.join(devices[0].client.platform_version.split())}"]
    for device in devices:
        memory = (device.memory_stats() or {}).get("bytes_limit")
        lines.append(f"{device.id}: {device.device_kind}" + (f", {memory:,} bytes" if memory else ""))
    return lines


def _size(path: Path | None) -> dict[str, Any]:
    files = [] if path is None else [file for file in (path, *path.rglob("*")) if file.is_file()]
    return {"path": path and str(path), "files": len(files), "bytes": sum(file.stat().st_size for file in files)}


def text(report: dict[str, Any]) -> str:
    """Format the environment as lines to paste into an issue."""
    lines = [f"{name}: {report[name]}" for name in ("kvjax", "python", "system")]
    for name in ("packages", "variables"):
        lines += [f"{name}:", *(f"  {key} {value}" for key, value in report[name].items())]
    lines += ["devices:", *(f"  {line}" for line in report["devices"]), "caches:"]
    for name, cache in report["caches"].items():
        size = f"{cache['path']} ({cache['files']} files, {cache['bytes']:,} bytes)" if cache["path"] else "none"
        lines.append(f"  {name}: {size}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = Parser(prog="kvjax env", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    options = parser.parse_args(argv)
    return finish("env", lambda: print((json.dumps if options.json else text)(environment())))
