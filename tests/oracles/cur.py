"""CUR: squared norms of keys and values, each divided by their sum over a group of consecutive tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from tests.oracles.evict_every import EvictEvery
from tests.oracles.l2 import rounded


def squared_norm(x: np.ndarray) -> float:
    return sum(float(each) ** 2 for each in x)


class CUR(EvictEvery):
    """`gaussian` (columns) gives a matrix [d, columns] for each head and is injected."""

    neighbors: int
    projections: int | None
    gaussian: Callable[[int], Sequence[np.ndarray]]

    def scores(self, h, new):
        head = self.heads[h]
        keys, values = np.array(head.keys), np.array(head.values)
        if self.projections is not None:
            matrix = self.gaussian(self.projections)[h] / math.sqrt(self.projections)
            keys, values = keys @ matrix, values @ matrix
        scores = []
        for i in range(len(keys)):
            first = i // self.neighbors * self.neighbors
            group = range(first, min(first + self.neighbors, len(keys)))
            shares = [squared_norm(x[i]) / sum(squared_norm(x[j]) for j in group) for x in (keys, values)]
            scores.append(rounded(shares[0] * shares[1]))
        return scores
