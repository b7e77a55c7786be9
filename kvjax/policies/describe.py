"""What the registered policies and parts are and what their settings mean, read off their docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any, NamedTuple

from kvjax.policies.registry import PAPERS, PLANS, REGISTRY, RESIDUALS, SELECTIONS, combine, policy, settings_of
from kvjax.types import setting_names


class Setting(NamedTuple):
    """A setting as users write it, its default, and what it means."""

    name: str
    default: Any
    meaning: str


class Entry(NamedTuple):
    """A policy or a part by name: what it is, where it comes from, and its settings."""

    name: str
    summary: str
    paper: str
    settings: list[Setting]


def policies() -> dict[str, list[Entry]]:
    """The policies in their groups; settings that nearly all have are those of `common`."""
    return {group: [described(name, own=True) for name in names] for group, names in PAPERS.items()}


def described(name: str, own: bool = False) -> Entry:
    """A registered policy.

    Args:
        name: a key of `REGISTRY`.
        own: leave out what nearly all policies take, with the same default.
    """
    method = REGISTRY[name]
    paper = next(papers[name] for papers in PAPERS.values() if name in papers)
    made = policy(name)
    inner = getattr(made.plan, "plan", None)
    parts = (made.score, made.protection, made.plan, inner, made.selection, made.codec, made.residual)
    known: dict[str, str] = {}
    for source in (combine, *(base for part in reversed(parts) for base in reversed(type(part).__mro__)), method):
        known |= _meanings(source)
    usual = {setting.name: setting.default for setting in common()}
    settings = [
        Setting(setting, default, known.get(setting, ""))
        for setting, default in settings_of(name).items()
        if not own or usual.get(setting, ...) != default
    ]
    return Entry(name, _summary(method), paper, settings)


def common() -> list[Setting]:
    """Settings that nearly all policies take, with their usual defaults."""
    known = _meanings(combine)
    parameters = inspect.signature(combine).parameters.values()
    return [Setting(p.name, p.default, known[p.name]) for p in parameters if p.kind is p.KEYWORD_ONLY]


def parts() -> dict[str, list[Entry]]:
    """The other parts by name, their settings as the command line takes them."""
    tables: dict[str, dict[str, Any]] = {"plan": PLANS, "residual": RESIDUALS, "selection": SELECTIONS}
    return {
        part: [Entry(name, _summary(kind), "", _fields(part, kind)) for name, kind in table.items()]
        for part, table in tables.items()
    }


def _fields(part: str, kind: type[Any]) -> list[Setting]:
    known: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        known |= _meanings(base)
    fields = [field for field in dataclasses.fields(kind) if field.name in setting_names(kind)]
    return [Setting(f"{part}.{field.name}", field.default, known.get(field.name, "")) for field in fields]


def _summary(described: Any) -> str:
    return (inspect.getdoc(described) or "").partition("\n")[0]


def _meanings(described: Any) -> dict[str, str]:
    # The entries of a docstring's Args.
    text = (
        inspect.cleandoc(vars(described).get("__doc__") or "")
        if isinstance(described, type)
        else inspect.getdoc(described)
    )
    _, _, arguments = (text or "").partition("Args:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", arguments.partition("\n\n")[0], flags=re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in found}
