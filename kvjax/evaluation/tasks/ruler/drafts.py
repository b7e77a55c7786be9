"""Drafts of cases: their settings, their random texts, and a context for any amount of hay."""

from __future__ import annotations

import dataclasses
import random
import uuid
from collections.abc import Callable, Sequence

from kvjax.evaluation.tasks.words import ADJECTIVES, NOUNS


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of keys or values: its name in a needle, and a function that draws one."""

    name: str
    draw: Callable[[random.Random], str]


KINDS = {
    "words": Kind("word", lambda rng: f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"),
    "numbers": Kind("number", lambda rng: str(rng.randrange(10**6, 10**7))),
    "uuids": Kind("code", lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4))),
}
"""Possible values of `key_type` and `value_type`."""


@dataclasses.dataclass(frozen=True)
class Draft:
    """Case without its final amount of hay.

    Args:
        context: returns the context with a number of units of hay; more units never give fewer tokens.
        question: as in `Case`.
        answers: as in `Case`.
        prefix: as in `Case`.
        keys: number of keys, or of words to distinguish, in the context.
        hay_keys: keys that each unit of hay adds.
        least: units of hay that the question needs to have an answer.
    """

    context: Callable[[int], str]
    question: str
    answers: tuple[str, ...]
    prefix: str
    keys: int = 1
    hay_keys: int = 0
    least: int = 0


@dataclasses.dataclass(frozen=True)
class CaseRequest:
    """Settings of a draft; `cases` explains them. A draft reads only those that its family takes.

    Args:
        words: words of the text.
    """

    length: int
    depth: float | None
    words: Sequence[str]
    hay: str | None
    needles: int
    key_type: str
    value_type: str

    def first_depth(self, draws: Draws) -> float:
        """Return the depth of the first needle: the given one, or a random one."""
        return draws.rng.random() if self.depth is None else self.depth


@dataclasses.dataclass(frozen=True)
class QuestionFamily:
    """A kind of question.

    Args:
        draft: makes a case without its hay.
        summary: what is asked.
        hays: possible kinds of hay, the default first; empty if the family has its own.
        depth: True if a single needle is asked for, which has a depth.
        needles: default, minimum and maximum number; None for a fixed number.
        types: True if keys and values may be of several kinds.
        max_new_tokens: tokens of an answer, as in RULER.
    """

    draft: Callable[[CaseRequest, Draws], Draft]
    summary: str
    hays: tuple[str, ...]
    depth: bool = False
    needles: tuple[int, int, int] | None = None
    types: bool = False
    max_new_tokens: int = 128


class Draws:
    """Random texts without repetition."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._used: set[str] = set()

    def fresh(self, draw: Callable[[random.Random], str]) -> str:
        """Draw a text that was not drawn before.

        Raises:
            ValueError: there are hardly any left.
        """
        for _ in range(1000):
            if (made := draw(self.rng)) not in self._used:
                self._used.add(made)
                return made
        raise ValueError(f"{len(self._used)} different keys and values of this kind do not exist; ask for uuids.")
