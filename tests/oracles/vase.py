"""VaSE: a token's note is the attention of each query that saw it, by the query's position."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from tests.oracles.cur import squared_norm
from tests.oracles.decoder import Prompt
from tests.oracles.evict_every import EvictEvery
from tests.oracles.l2 import rounded


class VaSE(EvictEvery):
    """`uniform` (ranking) [h, positions] and `gaussian` (columns, ranking) [h][d, columns] are injected."""

    uniform: Callable[[int], np.ndarray]
    gaussian: Callable[[int, int], Sequence[np.ndarray]]
    large: int | float
    by: str
    kernel: int

    def gumbel(self, h: int, ranking: int, position: int) -> float:
        return -math.log(-math.log(float(self.uniform(ranking)[h, position])))

    def read(self, prompt):
        for h, head in enumerate(self.heads):
            for i in range(prompt.prompt_length):
                queries = range(i, prompt.prompt_length)
                head.notes[i] = {query: self.paid([row[query, i] for row in prompt.probs[h]]) for query in queries}

    def paid(self, shares) -> float:
        """The mean over the query heads of a group."""
        return sum(shares) / self.groups

    def note(self, h, new):
        return {}

    def after(self, new, probs):
        for h, head in enumerate(self.heads):
            for i, note in enumerate(head.notes):
                note[new.position] = self.paid([row[i] for row in probs[h]])

    def scores(self, h, new):
        head, newest = self.heads[h], new.position
        rest = [i for i, position in enumerate(head.positions) if position <= newest - self.recents[h]]
        large = math.floor(self.large * self.limits[h] + 1e-6) if isinstance(self.large, float) else self.large

        def size(i: int) -> float:
            if head.positions[i] < self.sinks:
                return math.inf
            if self.by == "range":
                return rounded(max(head.values[i]) - min(head.values[i]))
            matrix = self.gaussian(20, newest // self.evict_every)[h] / math.sqrt(20)
            return rounded(squared_norm(head.keys[i] @ matrix) * squared_norm(head.values[i] @ matrix))

        chosen = sorted(rest, key=lambda i: (-size(i), -i))[:large]
        read = newest + isinstance(new, Prompt)  # a token that needs a slot has not asked yet
        queries = range(read - self.evict_every, read)
        mean = {i: sum(head.notes[i].get(query, 0.0) for query in queries) / self.evict_every for i in rest}
        scores = []
        for i, position in enumerate(head.positions):
            if i in chosen or i not in rest:
                scores.append(math.inf)
                continue
            near = range(i - self.kernel // 2, i + self.kernel // 2 + 1)
            pooled = sum(mean.get(j, 0.0) for j in near) / self.kernel
            scores.append(math.log(pooled) + self.gumbel(h, newest // self.evict_every, position))
        return scores
