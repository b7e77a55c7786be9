"""SnapKV: a prompt token's note is the attention of the window's queries, pooled over its neighbours."""

from __future__ import annotations

import math

from tests.oracles.decoder import Oracle


class SnapKV(Oracle):
    window: int | float
    kernel: int
    pooling: str
    group: str

    def read(self, prompt):
        n = prompt.prompt_length
        for h, head in enumerate(self.heads):
            share = isinstance(self.window, float)
            start = max(0, n - (math.floor(self.window * self.limits[h] + 1e-6) if share else int(self.window)))
            looked = [0.0] * start
            for i in range(start):
                for query in range(start, n):
                    row = [prompt.probs[h][g][query, i] for g in range(self.groups)]
                    looked[i] += max(row) if self.group == "max" else sum(row) / self.groups
            for i in range(n):
                if i >= start:
                    head.notes[i] = 0.0
                    continue
                half = self.kernel // 2
                neighbours = [looked[j] if j < start else 0.0 for j in range(max(0, i - half), i + half + 1) if j < n]
                if self.pooling == "max":
                    head.notes[i] = max(neighbours)
                else:
                    head.notes[i] = sum(neighbours) / self.kernel

    def note(self, h, new):
        return 0.0

    def scores(self, h, new):
        return self.heads[h].notes
