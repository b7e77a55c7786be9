"""Top-k oracle: nothing leaves, every query reads its k likeliest tokens, alone or over what a score keeps."""

from __future__ import annotations

import math

import numpy as np

from tests.oracles.decoder import Oracle


class Selecting(Oracle):
    """Every query of any oracle reads its k likeliest tokens."""

    k: int | float

    def reads(self, probs):
        k = self.k if isinstance(self.k, int) else math.ceil(self.k * np.count_nonzero(probs))
        return sorted(range(len(probs)), key=lambda i: (-probs[i], i))[:k]

    def attend(self, h, g, query, probs):
        strongest = self.reads(probs)
        mass = sum(probs[i] for i in strongest)
        out = np.zeros_like(query)
        for i in strongest:
            out = out + probs[i] / mass * self.heads[h].values[i]
        return out


class TopKOracle(Selecting):
    def scores(self, h, new):
        return [0.0] * len(self.heads[h].positions)
