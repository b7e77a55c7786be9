"""Contents of turns as a chat template reads them: texts or lists of parts, and texts that show what it leaves out."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from kvjax.utils.settings import Messages, text_of

_RAW = "qzrawjx"
"""Key in each part of a probe; a rendered text that has it was written from the list itself."""


def shapes(messages: Messages) -> list[Messages]:
    """Return a conversation in the shapes that templates read, the likeliest first.

    The first one is the conversation as it is. In the others, each role has texts or lists of parts throughout.
    """
    roles = list(dict.fromkeys(message["role"] for message in messages))
    sizes = dict.fromkeys((0, len(roles), 1, max(len(roles) - 1, 0)))
    subsets = [set(subset) for size in sizes for subset in itertools.combinations(roles, size)]
    conversations = [messages]
    for subset in subsets:
        turns = [turn | {"content": _content(turn["content"], turn["role"] in subset)} for turn in messages]
        if turns not in conversations:
            conversations.append(turns)
    return conversations


def _content(content: Any, parts: bool) -> Any:
    """Return the content of a turn as a text, or as a list of parts."""
    if not parts:
        return text_of(content)
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Probe(NamedTuple):
    """A conversation of the same shape whose texts no template changes, except for cutting them.

    Templates trim, escape and split texts on purpose: those of Qwen3 drop the thoughts of earlier answers. So only
    other texts show whether a template reads those of a conversation.
    """

    messages: Messages
    marks: list[tuple[int, str]]
    """Index of a turn, and a word at the beginning or at the end of its text."""

    def misread(self, text: str) -> bool:
        """Return whether a rendered text has a list of parts where its texts belong."""
        return _RAW in text.casefold()

    def lost_turn(self, text: str) -> int | None:
        """Return the index of the first turn whose text a rendered text lacks; None if it has all."""
        text = text.casefold()
        return next((turn for turn, mark in self.marks if mark not in text), None)


def probe(messages: Messages) -> Probe:
    """Replace the texts of a conversation by words of about the same length; blank texts stay."""
    marks: list[tuple[int, str]] = []

    def placeholder(turn: int, text: str) -> str:
        if not text.strip():
            return text
        words = f"qz{len(marks)}jx", f"xj{len(marks)}zq"
        marks.extend((turn, word) for word in words)
        return " ".join([words[0], *["a"] * ((len(text) - len("".join(words))) // 2), words[1]])

    turns: Messages = []
    for turn, message in enumerate(messages):
        content = message["content"]
        if isinstance(content, str):
            content = placeholder(turn, content)
        else:
            content = [part | {"text": placeholder(turn, part["text"]), _RAW: ""} for part in content]
        turns.append(message | {"content": content})
    return Probe(turns, marks)
