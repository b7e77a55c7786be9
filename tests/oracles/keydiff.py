"""KeyDiff, equation 5: the key that is most like the mean direction of the cached keys leaves first."""

from __future__ import annotations

import math

from tests.oracles.evict_every import EvictEvery


class KeyDiff(EvictEvery):
    def scores(self, h, new):
        keys = [[float(x) for x in key] for key in self.heads[h].keys]
        units = [[x / math.sqrt(sum(y * y for y in key)) for x in key] for key in keys]
        mean = [sum(column) / len(units) for column in zip(*units, strict=True)]
        length = math.sqrt(sum(x * x for x in mean))
        return [-sum(x * y for x, y in zip(unit, mean, strict=True)) / length for unit in units]
