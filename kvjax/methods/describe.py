"""Descriptions of the registered policies, parts and settings, parsed from their docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvjax.methods.register import PAPERS, REGISTRY, TABLES, combine, installed, load_installed
from kvjax.methods.registry import annotations_of, from_file, names_file, policy, settings_of
from kvjax.policies import Codec, Policy, Protection, Uniform
from kvjax.types import setting_names
from kvjax.utils.suggest import choices


class Setting(NamedTuple):
    """Setting in the form that users write, with its type, default and meaning."""

    name: str
    kind: str
    default: Any
    meaning: str


class Description(NamedTuple):
    """Description of a named policy or part."""

    name: str
    summary: str
    paper: str
    settings: list[Setting]
    when: str
    """Advice on when to use it, from measurements."""
    sources: list[Any]
    """Classes and functions whose docstrings describe it."""


def policies() -> dict[str, list[Description]]:
    """Return the policies by group, without the settings of `common` that keep their usual defaults.

    Methods of installed packages are among them.
    """
    for name in installed():
        load_installed(name, REGISTRY, *TABLES.values())
    return {group: [describe_policy(name, without_common=True) for name in names] for group, names in PAPERS.items()}


def describe_policy(name: str, without_common: bool = False) -> Description:
    """Describe a registered policy; `without_common` omits settings of nearly all policies with usual defaults."""
    method = REGISTRY[name]
    paper = next(papers[name] for papers in PAPERS.values() if name in papers)
    plain = policy(name)
    inner = getattr(plain.plan, "plan", None)
    parts = (plain.score, plain.protection, plain.plan, inner, plain.selection, plain.codec, plain.residual)
    meanings = _meanings(combine, *(base for part in reversed(parts) for base in reversed(type(part).__mro__)), method)
    kinds = annotations_of(combine) | annotations_of(method)
    defaults = {setting.name: setting.default for setting in common()}
    settings = [
        Setting(setting, kinds[setting], default, meanings.get(setting, ""))
        for setting, default in settings_of(name).items()
        if not without_common or defaults.get(setting, ...) != default
    ]
    of_parts = [type(part) for part in parts if part is not None and type(part) not in (Protection, Uniform, Codec)]
    sources = [inspect.unwrap(method), *of_parts]  # the class of a registered score stands for its function
    return Description(name, _summary(method), paper, settings, _under("When", method), list(dict.fromkeys(sources)))


def describe_named(name: str, parts_by_kind: Mapping[str, str]) -> list[Description]:
    """Describe a policy, registered or of a user's file, and the parts that replace its own.

    Raises:
        ValueError: there is no such policy.
    """
    if names_file(name):
        first = describe_own(name)
    elif name in REGISTRY:
        first = describe_policy(name)
    else:
        raise ValueError(f"there is no policy {name!r}; {choices(name, REGISTRY)}")
    return [first, *(part for kind in parts_by_kind for part in parts()[kind] if part.name == parts_by_kind[kind])]


def describe_own(name: str) -> Description:
    """Describe a policy of a user's file, named as `FILE.py:NAME`."""
    source = from_file("policy", name)
    described = source if callable(source) else type(source)
    takes = inspect.signature(source).parameters.values() if callable(source) else ()
    parameters = {p.name: p for p in takes if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    meanings = _meanings(combine, *reversed(getattr(described, "__mro__", (described,))))
    settings = [
        Setting(p.name, _type_name(p.annotation), p.default, meanings.get(p.name, "")) for p in parameters.values()
    ]
    common_settings = [setting for setting in common() if setting.name not in parameters]
    if isinstance(source, Policy):
        values = {name: getattr(source.protection, name) for name in ("sinks", "recent", "special")}
        values |= {"positions": source.codec.positions, "evict_every": source.evict_every}
        common_settings = [setting._replace(default=values[setting.name]) for setting in common_settings]
    summary = repr(source) if isinstance(source, Policy) else _summary(described)
    return Description(name, summary, "", [*settings, *common_settings], _under("When", described), [described])


def _type_name(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def common() -> list[Setting]:
    """Return the settings that nearly all policies take, with their usual defaults."""
    meanings = _meanings(combine)
    parameters = inspect.signature(combine).parameters.values()
    return [Setting(p.name, p.annotation, p.default, meanings[p.name]) for p in parameters if p.kind is p.KEYWORD_ONLY]


def parts() -> dict[str, list[Description]]:
    """Return the plans, residuals, codecs and selections, with settings named as on the command line."""
    return {
        part: [
            Description(name, _summary(kind), _under("From", kind), _fields(part, kind), _under("When", kind), [kind])
            for name, kind in table.items()
        ]
        for part, table in TABLES.items()
    }


def explanation(source: Any) -> str:
    """Return a docstring's other paragraphs, without summary, `From`, `When`, arguments and exceptions, as reST."""
    _, *paragraphs = _text(source).split("\n\n")
    sections = ("From: ", "When: ", "Args:", "Raises:", "Returns:")
    return "\n\n".join(paragraph for paragraph in paragraphs if not paragraph.startswith(sections))


def _fields(part: str, kind: Any) -> list[Setting]:
    meanings, names = _meanings(*reversed(kind.__mro__)), setting_names(kind)
    return [
        Setting(f"{part}.{field.name}", str(field.type), field.default, meanings.get(field.name, ""))
        for field in dataclasses.fields(kind)
        if field.name in names
    ]


def _text(described: Any) -> str:
    # A class may inherit a docstring, so take only its own.
    docstring = vars(described).get("__doc__") if isinstance(described, type) else described.__doc__
    return inspect.cleandoc(docstring or "")


def _summary(described: Any) -> str:
    return _text(described).partition("\n")[0]


def _under(what: str, described: Any) -> str:
    # The paragraph of a docstring that begins with this word and a colon.
    paragraphs = (paragraph.partition(": ") for paragraph in _text(described).split("\n\n"))
    return next((" ".join(text.split()) for word, _, text in paragraphs if word == what), "")


def _meanings(*described: Any) -> dict[str, str]:
    # The entries under Args in docstrings; later ones replace earlier ones.
    meanings: dict[str, str] = {}
    for source in described:
        arguments = _text(source).partition("Args:\n")[2].partition("\n\n")[0]
        for name, meaning in re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", arguments, flags=re.MULTILINE):
            meanings[name] = " ".join(meaning.split())
    return meanings
