"""Words that users mistype, and those that they meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def meant(word: str, known: Iterable[str]) -> str | None:
    """The known word that a mistyped one is closest to, or None."""
    plain = {alike(each): each for each in known}
    near = difflib.get_close_matches(alike(word), plain, 1)
    return plain[near[0]] if near else None


def alike(word: str) -> str:
    """A word as users may spell it, with dashes or underscores and capitals or none."""
    return word.removeprefix("--").lower().replace("-", "_")


def choices(word: str, known: Iterable[str], also: str = "") -> str:
    """The end of a sentence that refuses a word: the known one that was meant, or all of them.

    Args:
        word: as given.
        known: what there is.
        also: what else there is, after the list.
    """
    names = list(known)
    near = meant(word, names)
    return f"did you mean {near}?" if near else f"choose one of {', '.join(names)}{also}."
