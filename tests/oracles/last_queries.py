"""Scores by the last queries, which attend again to what is held before tokens leave; keys at original positions.

A token's note is the mean attention of these queries.
"""

from __future__ import annotations

import abc
import math

import numpy as np

from tests.oracles.decoder import softmax
from tests.oracles.evict_every import EvictEvery


class LastQueries(EvictEvery):
    recent: int  # type: ignore[assignment]
    kernel: int
    pooling: str
    evict_every: int

    def start(self):
        super().start()
        self.asked: list[tuple[int, list[list[np.ndarray]]]] = []

    def read(self, prompt):
        for i in range(prompt.prompt_length):
            self.asked.append((i, [[query[i] for query in group] for group in prompt.queries]))
        self.look(prompt.prompt_length)

    def turned(self, turn):
        self.look(turn.prompt_length)

    def note(self, h, new):
        return 0.0

    def after(self, new, probs):
        self.asked.append((new.position, new.queries))
        if (new.position + 1) % self.evict_every == 0:
            self.look(new.position + 1)

    def look(self, length: int) -> None:
        """Let the last queries of a text of so many tokens attend again."""
        last = [(position, queries) for position, queries in self.asked if position >= length - self.recent]
        for h, head in enumerate(self.heads):
            sums = [0.0] * len(head.positions)
            for position, queries in last:
                seen = [i for i, held in enumerate(head.positions) if held <= self.newest_seen(position, length)]
                if not seen:
                    continue
                keys = np.array([head.keys[i] for i in seen])
                logits = [keys @ query / math.sqrt(len(query)) for query in queries[h]]
                for i, p in zip(seen, self.shares(logits), strict=True):
                    sums[i] += p
            head.notes = [total / len(last) for total in sums]

    @abc.abstractmethod
    def newest_seen(self, position: int, length: int) -> int:
        """The position of the newest token that a query of a text of so many tokens looks at."""

    @abc.abstractmethod
    def shares(self, logits: list[np.ndarray]) -> np.ndarray:
        """A query's attention, from the logits of a group's query heads."""

    def attention(self, h, new) -> list[float]:
        """What the tokens before the window got, pooled over their neighbors there."""
        head = self.heads[h]
        before = [i for i, position in enumerate(head.positions) if position < self.begin(new)]
        half, found = self.kernel // 2, [0.0] * len(head.notes)
        for i in before:
            near = [head.notes[j] if j in before else 0.0 for j in range(i - half, i + half + 1)]
            found[i] = max(near) if self.pooling == "max" else sum(near) / self.kernel
        return found

    def begin(self, new) -> int:
        """The first position of the window; a new token that is decoded is not in it."""
        return new.position + hasattr(new, "probs") - self.recent

    def with_window(self, h, new, found: list[float]) -> list[float]:
        """Scores with which the tokens of the window stay."""
        positions = self.heads[h].positions
        return [math.inf if p >= self.begin(new) else x for p, x in zip(positions, found, strict=True)]


class SnapKVDecode(LastQueries):
    def newest_seen(self, position, length):
        return position

    def shares(self, logits):
        return np.mean([softmax(x) for x in logits], axis=0)

    def scores(self, h, new):
        return self.with_window(h, new, self.attention(h, new))


class RKV(LastQueries):
    importance: float
    threshold: float

    def newest_seen(self, position, length):
        return length - self.recent - 1

    def shares(self, logits):
        return softmax(np.max(logits, axis=0))

    def scores(self, h, new):
        units = [key / math.sqrt(sum(x * x for x in key)) for key in self.heads[h].keys]
        n = len(units)
        cosine = [[0.0 if i == j else float(units[i] @ units[j]) for j in range(n)] for i in range(n)]
        for row in cosine:
            similar = [j for j, each in enumerate(row) if each > self.threshold]
            if similar:
                row[similar[-1]] = 0.0
        redundancy = softmax(np.array([sum(row[i] for row in cosine) / n for i in range(n)]))
        pairs = zip(self.attention(h, new), redundancy, strict=True)
        found = [self.importance * a - (1 - self.importance) * r for a, r in pairs]
        return self.with_window(h, new, found)
