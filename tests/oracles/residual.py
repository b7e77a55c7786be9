"""What the oracles of residuals share: every pair that leaves a cache is seen once, one at a time."""

from __future__ import annotations

import math

import numpy as np

from tests.oracles.decoder import Oracle


class Remembering(Oracle):
    """An oracle with a memory of what has left."""

    def fold(self, h, i):
        """Token i of head h is about to leave."""
        raise NotImplementedError

    def keep(self, prompt):
        staying = super().keep(prompt)
        for h in range(self.kv_heads):
            for i in range(len(self.heads[h].positions)):
                if i not in staying[h]:
                    self.fold(h, i)
        return staying

    def leaving(self, new):
        leaving = super().leaving(new)
        for h in range(self.kv_heads):
            if leaving[h] is not None:
                self.fold(h, leaving[h])
        return leaving

    def retain(self, h, indices):
        for i in range(len(self.heads[h].positions)):
            if i not in indices:
                self.fold(h, i)
        super().retain(h, indices)

    def beside(self, h: int, g: int, probs: np.ndarray, above: np.ndarray, below: float) -> np.ndarray:
        """The average of the held values and of a memory with numerator `above` and denominator `below`."""
        head = self.heads[h]
        keys, queries = self.saw
        bias = self.bias(h, g, self.places(h))
        for i in self.reads(probs):
            weight = math.exp(queries[g] @ keys[i] / math.sqrt(len(keys[i])) + bias[i])
            above, below = above + weight * head.values[i], below + weight
        return above / below
