"""Drafts of cases: their settings, their random texts, and contexts with any amount of hay and planted needles."""

from __future__ import annotations

import dataclasses
import itertools
import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvjax.evaluation.tasks.words import ADJECTIVES, NOUNS

NOISE = (
    "Rain falls on the hills.",
    "The river runs to the sea.",
    "Birds rest in the old trees.",
    "A wind blows from the west.",
    "Night comes after the day.",
)
"""Sentences repeated as hay."""
HAYS = ("noise", "needles", "essay")
"""Kinds of hay: repeated sentences, needles that are not asked for, a text of the user's."""


class Kind(NamedTuple):
    """A kind of keys or values: its name in a needle, and a function that draws one."""

    name: str
    draw: Callable[[random.Random], str]


KINDS = {
    "words": Kind("word", lambda rng: f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"),
    "numbers": Kind("number", lambda rng: str(rng.randrange(10**6, 10**7))),
    "uuids": Kind("code", lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4))),
}
"""Possible values of `key_type` and `value_type`."""


class Draft(NamedTuple):
    """Case without its final amount of hay."""

    context: Callable[[int], str]
    """The context with a number of units of hay; more units never give fewer tokens."""
    question: str
    references: tuple[str, ...]
    prefix: str
    keys: int = 1
    """Number of keys, or of words to distinguish, in the context."""
    hay_keys: int = 0
    """Keys that each unit of hay adds."""
    min_units: int = 0
    """Units of hay that the question needs to have an answer."""


class Hay:
    """Endless units of hay, made on demand and joined by `joint`."""

    def __init__(self, units: Iterator[str], joint: str) -> None:
        self._units, self._made, self._joint = units, list[str](), joint

    def take(self, count: int) -> list[str]:
        """Return the first units."""
        self._made += itertools.islice(self._units, max(0, count - len(self._made)))
        return self._made[:count]

    def plant(self, count: int, needles: Sequence[tuple[float, str]]) -> str:
        """Join a number of units with needles at their depths; needles of equal depth keep their order."""
        hay, parts, done = self.take(count), list[str](), 0
        for depth, needle in sorted(needles, key=lambda planted: planted[0]):
            place = _place(hay, depth)
            parts += [*hay[done:place], needle]
            done = place
        return self._joint.join([*parts, *hay[done:]])


def _place(hay: Sequence[str], depth: float) -> int:
    # Take the nearest end of a sentence, unless there is none within a twentieth of the text.
    exact = round(depth * len(hay))
    for step in range(len(hay) // 20 + 1):
        for place in (exact - step, exact + step):
            within = 0 < place < len(hay)
            if place in (0, len(hay)) or (within and hay[place - 1].endswith((".", "!", "?", '"'))):
                return place
    return exact


@dataclasses.dataclass(frozen=True)
class CaseRequest:
    """Settings of a draft, which `cases` explains, and its random draws.

    Args:
        words: words of the text.
    """

    rng: random.Random
    length: int
    depth: float | None
    words: Sequence[str]
    hay: str | None
    needles: int
    key_type: str
    value_type: str
    _used: set[str] = dataclasses.field(default_factory=set)

    def first_depth(self) -> float:
        """Return the depth of the first needle: the given one, or a random one."""
        return self.rng.random() if self.depth is None else self.depth

    def text_hay(self) -> Hay:
        """Return the hay that is asked for: repeated sentences, or the text from a random sentence on."""
        if self.hay == "noise":
            return Hay(itertools.cycle(NOISE), " ")
        words = self.words
        ends = [i for i, word in enumerate(words, 1) if word.endswith((".", "!", "?"))]
        start = self.rng.choice(ends or [0])
        return Hay((words[i % len(words)] for i in itertools.count(start)), " ")

    def fresh(self, draw: Callable[[random.Random], str]) -> str:
        """Draw a text that was not drawn before, or refuse if there are hardly any left."""
        for _ in range(1000):
            if (text := draw(self.rng)) not in self._used:
                self._used.add(text)
                return text
        raise ValueError(f"{len(self._used)} different keys and values of this kind do not exist; ask for uuids.")


class QuestionFamily(NamedTuple):
    """A kind of question."""

    draft: Callable[[CaseRequest], Draft]
    summary: str
    hays: tuple[str, ...]
    """Possible kinds of hay, the default first; empty if the family has its own."""
    depth: bool = False
    """True if a single needle is asked for, which has a depth."""
    needles: tuple[int, int, int] | None = None
    """Default, minimum and maximum number; None for a fixed number."""
    types: bool = False
    """True if keys and values may be of several kinds."""
    max_new_tokens: int = 128
    """Tokens of an answer, as in RULER."""
