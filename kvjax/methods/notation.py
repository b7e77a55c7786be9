"""Parser of policies as users write them: `h2o`, `h2o+less+int8`, `mine.py:Mine+int4[recent=16]`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvjax.methods.register import REGISTRY, TABLES, load_installed
from kvjax.methods.registry import policy, settings_of
from kvjax.policies.policy import Policy
from kvjax.utils.settings import parse_settings
from kvjax.utils.suggest import choices


class Named(NamedTuple):
    """Parsed name of a policy, such as `h2o`, `h2o+less+int8+adakv` or `mine.py:Mine+int4[recent=16]`."""

    name: str
    """Name as `kvjax.policy` takes it."""
    parts: dict[str, str]
    """Names of plan, residual, codec and selection by kind; written after plus signs."""
    settings: dict[str, Any]
    """Settings; written in brackets."""

    def build(self, parts: Mapping[str, str | None], settings: Mapping[str, Any]) -> Policy:
        """Build the policy, with additional parts and settings from other options.

        Raises:
            ValueError: a name or a setting is unknown, or there are two parts of the same kind.
        """
        return policy(self.name, **combined_parts(self.parts, parts), **(self.settings | dict(settings)))


def combined_parts(in_name: Mapping[str, str], options: Mapping[str, str | None]) -> dict[str, str | None]:
    """Merge the parts in a policy's name with those of separate options, by kind of part.

    Raises:
        ValueError: both name a part of the same kind, and the parts differ.
    """
    for kind, name in options.items():
        if name is not None and in_name.get(kind, name) != name:
            raise ValueError(f"--{kind} {name} does not go with {in_name[kind]} in the policy's name; name one {kind}.")
    return dict(options) | dict(in_name)


def parse_policy(text: str) -> Named:
    """Parse a policy and its parts as written on a command line, without building them.

    Raises:
        ValueError: the text has another form, a part is unknown, or there are two parts of the same kind.
    """
    match = re.fullmatch(r"((?:.*\.py:)?[^\[\]+]*)((?:\+[^\[\]+]*)*)(?:\[(.*)\])?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not of the form name+part[setting=value].")
    parts: dict[str, str] = {}
    load_installed(match[1].strip(), REGISTRY)
    for part in map(str.strip, match[2].split("+")[1:]):
        load_installed(part, *TABLES.values())
        kind = next((kind for kind, names in TABLES.items() if part in names), None)
        if kind is None:
            part_names = [name for names in TABLES.values() for name in names]
            raise ValueError(f"{text!r}: there is no part {part!r}; {choices(part, part_names)}")
        if kind in parts:
            raise ValueError(f"{text!r} has two parts of one kind, {parts[kind]} and {part}; name one {kind}.")
        parts[kind] = part
    words = [word.strip() for word in re.split(r",(?![^(]*\))", match[3])] if match[3] else []
    return Named(match[1].strip(), parts, parse_settings(words))


def combination(text: str) -> Policy:
    """Build a policy from its written form; see `Named`.

    Raises:
        ValueError: a name or a setting is unknown, or parts are incompatible.
    """
    return parse_policy(text).build({}, {})


def compared(
    texts: str,
    parts: Mapping[str, str | None],
    settings: Mapping[str, Any],
    left_out: Callable[[str], None] | None = None,
) -> dict[str, Policy]:
    """Build the policies of a comparison, by label; the full cache ignores `parts` and `settings`.

    Args:
        texts: policies as `--policies` takes them, separated by commas.
        parts: parts for all policies, by kind.
        settings: settings for all policies that take them.
        left_out: called with the reason if a policy does not support these parts and is omitted; None to raise instead.

    Raises:
        ValueError: a name is unknown, no policy takes a setting, or parts are incompatible.
    """
    specs = {text.strip(): parse_policy(text) for text in re.split(r",(?![^\[]*\])", texts)}
    defaults = {label: _settings(spec) for label, spec in specs.items()}
    for setting in settings:
        if "." not in setting and not any(its is None or setting in its for its in defaults.values()):
            raise ValueError(f"--set {setting}: none of the policies {texts} has this setting.")
    policies: dict[str, Policy] = {}
    for label, spec in specs.items():
        if spec.name == "full" and not spec.parts:
            policies["full"] = spec.build({}, {})
            continue
        its = defaults[label]
        supported = {key: value for key, value in settings.items() if "." in key or its is None or key in its}
        more = [name for kind, name in parts.items() if name is not None and kind not in spec.parts]
        head, bracket, inside = label.partition("[")
        words = list(filter(None, (inside.removesuffix("]"), *(f"{key}={value}" for key, value in supported.items()))))
        label = "+".join([head, *more]) + (f"[{','.join(words)}]" if bracket or words else "")
        try:
            policies[label] = spec.build(parts, supported)
        except ValueError as error:
            if left_out is None:
                raise
            left_out(f"{label} is left out: {error}")
    return policies


def _settings(spec: Named) -> dict[str, Any] | None:
    """Return the settings and defaults of a policy and its base; None for a user's policy, which checks them."""
    if spec.name not in REGISTRY:
        return None if ".py:" in spec.name else {}
    its = settings_of(spec.name)
    base = spec.settings.get("base", its.get("base"))
    return its | (settings_of(base) if base in REGISTRY else {})
