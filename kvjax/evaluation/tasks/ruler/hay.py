"""Hay: text that fills a context, and the needles planted in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from kvjax.evaluation.tasks.ruler.drafts import CaseRequest, Draws

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


class Hay:
    """Endless units of hay, made on demand.

    Args:
        units: source of the units.
        joint: text between two units.
    """

    def __init__(self, units: Iterator[str], joint: str) -> None:
        self._units, self._made, self._joint = units, list[str](), joint

    def take(self, count: int) -> list[str]:
        """Return the first units."""
        self._made += itertools.islice(self._units, max(0, count - len(self._made)))
        return self._made[:count]

    def plant(self, count: int, needles: Sequence[tuple[float, str]]) -> str:
        """Join a number of units with needles at their depths; needles of equal depth keep their order."""
        hay, made, done = self.take(count), list[str](), 0
        for depth, needle in sorted(needles, key=lambda planted: planted[0]):
            place = _place(hay, depth)
            made += [*hay[done:place], needle]
            done = place
        return self._joint.join([*made, *hay[done:]])


def _place(hay: Sequence[str], depth: float) -> int:
    # Take the nearest end of a sentence, unless there is none within a twentieth of the text.
    exact = round(depth * len(hay))
    for step in range(len(hay) // 20 + 1):
        for place in (exact - step, exact + step):
            within = 0 < place < len(hay)
            if place in (0, len(hay)) or (within and hay[place - 1].endswith((".", "!", "?", '"'))):
                return place
    return exact


def hay_for(request: CaseRequest, draws: Draws) -> Hay:
    """Return the hay that a request asks for: repeated sentences, or its text from a random sentence on."""
    if request.hay == "noise":
        return Hay(itertools.cycle(NOISE), " ")
    words = request.words
    ends = [i for i, word in enumerate(words, 1) if word.endswith((".", "!", "?"))]
    start = draws.rng.choice(ends or [0])
    return Hay((words[i % len(words)] for i in itertools.count(start)), " ")
