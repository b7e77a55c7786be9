"""DropKV: a token's note is the damage that its eviction would do to each query that saw it, by the query's position.

The damage is measured: the output without the token, its attention shared out among the others, less the output.
"""

from __future__ import annotations

import numpy as np

from tests.oracles.decoder import Oracle


def damage(probs: np.ndarray, values: np.ndarray, j: int) -> float:
    """The squared distance between a query's output and what it were without token j."""
    others = [i for i in range(len(probs)) if i != j]
    rest = float(sum(probs[i] for i in others))
    without = sum(probs[i] / rest * values[i] for i in others) if rest > 0 else np.zeros(values.shape[1])
    apart = without - probs @ values
    return float(apart @ apart)


class DropKV(Oracle):
    window: int

    def start(self):
        super().start()
        self.newest = -1

    def read(self, prompt):
        n = prompt.prompt_length
        self.newest = n - 1
        for h, head in enumerate(self.heads):
            values = np.array(head.values)
            for j in range(n):
                head.notes[j] = {}
                for query in range(max(j, n - 2 * self.window), n):
                    rows = [prompt.probs[h][g][query, : query + 1] for g in range(self.groups)]
                    head.notes[j][query] = sum(damage(row, values[: query + 1], j) for row in rows)

    def note(self, h, new):
        return {}

    def after(self, new, probs):
        self.newest = new.position
        for h, head in enumerate(self.heads):
            for j, note in enumerate(head.notes):
                note[new.position] = sum(damage(row, np.array(head.values), j) for row in probs[h])

    def scores(self, h, new):
        first = self.newest // self.window * self.window - self.window
        return [sum(x for query, x in note.items() if query >= first) for note in self.heads[h].notes]
