"""Top-k oracle: nothing leaves, every query reads its k likeliest tokens."""

from __future__ import annotations

import math

import numpy as np

from tests.oracles.decoder import Oracle


class TopKOracle(Oracle):
    k: int | float

    def scores(self, h, new):
        return [0.0] * len(self.heads[h].positions)

    def attend(self, h, g, query, probs):
        k = self.k if isinstance(self.k, int) else math.ceil(self.k * np.count_nonzero(probs))
        strongest = sorted(range(len(probs)), key=lambda i: (-probs[i], i))[:k]
        mass = sum(probs[i] for i in strongest)
        out = np.zeros_like(query)
        for i in strongest:
            out = out + probs[i] / mass * self.heads[h].values[i]
        return out
