"""Suggestions for mistyped words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def meant(word: str, candidates: Iterable[str]) -> str | None:
    """Return the known word closest to a mistyped one, or None if none is close."""
    plain = {normalized(candidate): candidate for candidate in candidates}
    near = difflib.get_close_matches(normalized(word), plain, 1)
    return plain[near[0]] if near else None


def normalized(word: str) -> str:
    """Return a word in normal form: lower case, underscores for dashes, no leading `--`."""
    return word.removeprefix("--").lower().replace("-", "_")


def choices(word: str, candidates: Iterable[str], also: str = "", lead: str = "choose one of") -> str:
    """Return the end of a message about an unknown word: the closest known word, or all known words and `also`."""
    names = list(candidates)
    near = meant(word, names)
    return f"did you mean {near}?" if near else f"{lead} {', '.join(names) or 'none'}{also}."
