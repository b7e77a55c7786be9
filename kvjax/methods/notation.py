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

    def made(self, parts: Mapping[str, str | None], settings: Mapping[str, Any]) -> Policy:
        """Build the policy, with additional parts and settings from other options.

        Raises:
            ValueError: a name or a setting is unknown, or there are two parts of the same kind.
        """
        return policy(self.name, **both(self.parts, parts), **(self.settings | dict(settings)))


def both(written: Mapping[str, str], options: Mapping[str, str | None]) -> dict[str, str | None]:
    """Merge the parts in a policy's name with those of separate options, by kind of part.

    Raises:
        ValueError: both name a part of the same kind, and the parts differ.
    """
    for kind, name in options.items():
        if name is not None and written.get(kind, name) != name:
            raise ValueError(f"--{kind} {name} does not go with {written[kind]} in the policy's name; name one {kind}.")
    return dict(options) | dict(written)


def parse_policy(text: str) -> Named:
    """Parse a policy and its parts as written on a command line, without building them.

    Raises:
        ValueError: the text has another form, a part is unknown, or there are two parts of the same kind.
    """
    found = re.fullmatch(r"((?:.*\.py:)?[^\[\]+]*)((?:\+[^\[\]+]*)*)(?:\[(.*)\])?", text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not of the form name+part[setting=value].")
    parts: dict[str, str] = {}
    load_installed(found[1].strip(), REGISTRY)
    for part in map(str.strip, found[2].split("+")[1:]):
        load_installed(part, *TABLES.values())
        kind = next((kind for kind, names in TABLES.items() if part in names), None)
        if kind is None:
            known = [each for names in TABLES.values() for each in names]
            raise ValueError(f"{text!r}: there is no part {part!r}; {choices(part, known)}")
        if kind in parts:
            raise ValueError(f"{text!r} has two parts of one kind, {parts[kind]} and {part}; name one {kind}.")
        parts[kind] = part
    words = [word.strip() for word in re.split(r",(?![^(]*\))", found[3])] if found[3] else []
    return Named(found[1].strip(), parts, parse_settings(words))


def combination(text: str) -> Policy:
    """Build a policy from its written form; see `Named`.

    Raises:
        ValueError: a name or a setting is unknown, or parts are incompatible.
    """
    return parse_policy(text).made({}, {})


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
    named = {text.strip(): parse_policy(text) for text in re.split(r",(?![^\[]*\])", texts)}
    known = {label: _known(each) for label, each in named.items()}
    for setting in settings:
        if "." not in setting and not any(its is None or setting in its for its in known.values()):
            raise ValueError(f"--set {setting}: none of the policies {texts} has this setting.")
    made: dict[str, Policy] = {}
    for label, each in named.items():
        if each.name == "full" and not each.parts:
            made["full"] = each.made({}, {})
            continue
        its = known[label]
        own = {key: value for key, value in settings.items() if "." in key or its is None or key in its}
        more = [name for kind, name in parts.items() if name is not None and kind not in each.parts]
        head, bracket, inside = label.partition("[")
        words = [word for word in (inside.removesuffix("]"), *(f"{key}={value}" for key, value in own.items())) if word]
        label = "+".join([head, *more]) + (f"[{','.join(words)}]" if bracket or words else "")
        try:
            made[label] = each.made(parts, own)
        except ValueError as error:
            if left_out is None:
                raise
            left_out(f"{label} is left out: {error}")
    return made


def _known(named: Named) -> dict[str, Any] | None:
    """Return the settings and defaults of a policy and its base; None for a user's policy, which checks them."""
    if named.name not in REGISTRY:
        return None if ".py:" in named.name else {}
    its = settings_of(named.name)
    base = named.settings.get("base", its.get("base"))
    return its | (settings_of(base) if base in REGISTRY else {})
