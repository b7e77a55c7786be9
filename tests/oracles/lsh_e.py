"""LSH-E, Algorithm 1: a token's note is its hash, a list of bits."""

from __future__ import annotations

import numpy as np

from tests.oracles.decoder import Oracle


class LSHE(Oracle):
    """`planes` [h, bits, d] is injected."""

    evicts_first = True
    planes: np.ndarray

    def hash(self, h: int, x: np.ndarray) -> list[bool]:
        return [float(np.dot(plane.astype(np.float64), x)) >= 0 for plane in self.planes[h]]

    def read(self, prompt):
        for h, head in enumerate(self.heads):
            head.notes = [self.hash(h, key) for key in prompt.keys[h]]

    def note(self, h, new):
        return self.hash(h, new.keys[h])

    def scores(self, h, new):
        # Of a prompt read whole, the last query decides.
        whole = hasattr(new, "probs")
        codes = [self.hash(h, query[-1] if whole else query) for query in new.queries[h]]
        scores = []
        for note in self.heads[h].notes:
            distance = 0
            for code in codes:
                distance += sum(a != b for a, b in zip(code, note, strict=True))
            scores.append(-distance)
        return scores


class Sequential(LSHE):
    """The prompt, too, by Algorithm 1."""

    sequential = True
