"""SnapKV: a token's note is the attention of the windows' queries, and the same pooled over its neighbours."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tests.oracles.decoder import Oracle


@dataclasses.dataclass
class Note:
    """What a token was paid by queries at the ends of given texts, and what it scores."""

    looked: float = 0.0
    score: float = 0.0


class SnapKV(Oracle):
    kernel: int
    pooling: str
    group: str

    def begin(self, h: int, length: int) -> int:
        """Position from which the queries of a text that ends at `length` are in its window."""
        share = isinstance(self.recent, float)
        return max(0, length - (math.floor(self.recent * self.limits[h] + 1e-6) if share else int(self.recent)))

    def paid(self, row: Sequence[float]) -> float:
        """What the query heads of a group pay together."""
        return max(row) if self.group == "max" else sum(row) / self.groups

    def read(self, prompt):
        n = prompt.prompt_length
        for h, head in enumerate(self.heads):
            head.notes = [Note() for _ in range(n)]
            for i, note in enumerate(head.notes):
                for query in range(max(i, self.begin(h, n)), n):
                    note.looked += self.paid([prompt.probs[h][g][query, i] for g in range(self.groups)])
            self.pool(h, self.begin(h, n))

    def turned(self, turn):
        for h in range(self.kv_heads):
            self.pool(h, self.begin(h, turn.prompt_length))

    def pool(self, h: int, begin: int) -> None:
        """Score the tokens before the window by what was paid to them and to their neighbours before it."""
        head = self.heads[h]
        before = [i for i, position in enumerate(head.positions) if position < begin]
        half = self.kernel // 2
        for i, note in enumerate(head.notes):
            note.score = 0.0
            if i not in before:
                continue
            neighbours = range(max(0, i - half), min(len(head.notes), i + half + 1))
            looked = [head.notes[j].looked if j in before else 0.0 for j in neighbours]
            note.score = max(looked) if self.pooling == "max" else sum(looked) / self.kernel

    def note(self, h, new):
        return Note()

    def after(self, new, probs):
        for h, head in enumerate(self.heads):
            if self.given and new.position >= self.begin(h, new.prompt_length):
                for i, note in enumerate(head.notes):
                    note.looked += self.paid([probs[h][g][i] for g in range(self.groups)])

    def scores(self, h, new):
        return [note.score for note in self.heads[h].notes]


class Finch(SnapKV):
    """The window is what follows the last delimiter of a text; a query pays as often as it sees keys."""

    delimiter: int | None

    def start(self):
        super().start()
        self.paying = []

    def question(self, h: int, text) -> int:
        """Position at which the question of a text begins."""
        found = [text.start + i for i, token in enumerate(text.tokens[:-1]) if token == self.delimiter]
        return found[-1] + 1 if found else self.begin(h, text.prompt_length)

    def read(self, prompt):
        n = prompt.prompt_length
        for h, head in enumerate(self.heads):
            head.notes = [Note() for _ in range(n)]
            for i, note in enumerate(head.notes):
                for query in range(max(i, self.question(h, prompt)), n):
                    paid = self.paid([prompt.probs[h][g][query, i] for g in range(self.groups)])
                    note.looked += (query + 1) * paid
            self.rank(h, prompt)

    def after(self, new, probs):
        if self.given:
            self.paying.append((new.position, probs))

    def turned(self, turn):
        for h, head in enumerate(self.heads):
            for query, probs in self.paying:
                if query >= self.question(h, turn):
                    for i in range(len(probs[h][0])):
                        paid = self.paid([probs[h][g][i] for g in range(self.groups)])
                        head.notes[i].looked += (query + 1) * paid
            self.rank(h, turn)
        self.paying = []

    def rank(self, h: int, text) -> None:
        """The question first, then what it looked at."""
        for position, note in zip(self.heads[h].positions, self.heads[h].notes, strict=True):
            note.score = 1e30 if position >= self.question(h, text) else note.looked
