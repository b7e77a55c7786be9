"""What a user writes on a command line or in a config file, as settings of policies and their parts."""

from __future__ import annotations

import ast
import importlib.resources
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PART_KEYS = ("plan", "residual", "codec", "selection")
"""Parts that take the place of a policy's own, each by name."""
CONFIG_KEYS = ("policy", *PART_KEYS, "budget", "budget_of", "prefill_chunk", "settings")


def parse_settings(words: list[str]) -> dict[str, Any]:
    """`key=value` words as a dictionary; values are numbers, true, false, lists, or else text.

    Settings of a part are written as `residual.kernels=performer`.

    Raises:
        ValueError: a word has no `=`.
    """
    settings = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not (name and equals):
            raise ValueError(f"--set {word!r} is not of the form key=value.")
        settings[name.strip().replace("-", "_")] = parse_value(text.strip())
    return settings


def parse_value(text: str) -> Any:
    """A number, truth value, list or text, as a user would write it."""
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return tuple(value) if isinstance(value, list) else value


def parse_budget(text: str) -> int | float:
    """A budget: a whole number of slots, or a fraction.

    Raises:
        ValueError: neither.
    """
    value = parse_value(text)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"budget={text!r} is not a whole number of slots, nor a fraction such as 0.25.")
    return value


def config_directories() -> list[Path]:
    """Where shipped configs are: inside an installed package, beside the package in a checkout."""
    package = Path(str(importlib.resources.files("kvjax")))
    return [package / "configs", package.parent / "configs"]


def read_config(path_or_name: str) -> dict[str, Any]:
    """A config file: policy, parts, budget and what it is of, prefill_chunk, and the table `settings` as in `--set`.

    TOML reads `residual.kernels = "performer"` in that table as a table inside; here it is one dotted name again.

    Args:
        path_or_name: a TOML file, or the name of a shipped one.

    Raises:
        ValueError: there is no such file, it is not TOML, or it has an unknown key.
    """
    shipped = [directory / f"{path_or_name}.toml" for directory in config_directories()]
    file = next((path for path in (Path(path_or_name), *shipped) if path.is_file()), None)
    if file is None:
        names = sorted(path.stem for directory in config_directories() for path in directory.glob("*.toml"))
        raise ValueError(f"there is no config {path_or_name!r}; give a file, or one of {', '.join(names)}.")
    try:
        config = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not TOML: {error}.") from None
    for key in config:
        if key not in CONFIG_KEYS:
            raise ValueError(f"{file} has an unknown key {key!r}; a config takes {', '.join(CONFIG_KEYS)}.")
    return config | {"settings": _flat(config.get("settings", {}))}


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    # Tables inside as dotted names, lists as tuples.
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": part for inner, part in _flat(value).items()}
        else:
            flat[name] = tuple(value) if isinstance(value, list) else value
    return flat
