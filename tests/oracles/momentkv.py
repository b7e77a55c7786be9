"""The oracle of MomentKV: all evicted pairs in a list, and their moments anew for every query."""

from __future__ import annotations

import functools
import math

import numpy as np

from tests.oracles.decoder import Oracle
from tests.oracles.residual import Remembering


class _MomentKV(Remembering):
    def start(self):
        super().start()
        self.evicted: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(self.kv_heads)]

    def fold(self, h, i):
        self.evicted[h].append((self.heads[h].keys[i], self.heads[h].values[i]))

    def mass(self, h: int, query: np.ndarray) -> float:
        """Sum of the evicted exponentials to first order: that of the mean key for each of them."""
        if not self.evicted[h]:
            return 0.0
        mean = np.mean([key for key, _ in self.evicted[h]], axis=0)
        return len(self.evicted[h]) * math.exp(query @ mean / math.sqrt(len(query)))

    def average(self, h: int, query: np.ndarray) -> np.ndarray:
        """Average of the evicted values to first order."""
        keys, values = (np.array(side) for side in zip(*self.evicted[h], strict=True))
        covariance = np.zeros((values.shape[1], keys.shape[1]))
        for key, value in zip(keys, values, strict=True):
            covariance += np.outer(value - values.mean(0), key - keys.mean(0)) / len(keys)
        return values.mean(0) + covariance @ query / math.sqrt(len(query))

    def total(self, h: int, g: int, query: np.ndarray, logits: np.ndarray) -> float:
        return super().total(h, g, query, logits) + self.mass(h, query)

    def attend(self, h, g, query, probs):
        """While nothing has left, and so for a whole prompt, it is plain attention."""
        if not self.evicted[h]:
            return super().attend(h, g, query, probs)
        mass = self.mass(h, query)
        return self.beside(h, g, probs, mass * self.average(h, query), mass)


@functools.cache
def momentkv(base: type[Oracle]) -> type[Oracle]:
    """MomentKV over an oracle."""
    return type(f"MomentKV{base.__name__}", (_MomentKV, base), {})
