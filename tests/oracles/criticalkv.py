"""CriticalKV over an oracle: half of what a budget leaves by its scores, the rest by these times |W_O v|_1."""

from __future__ import annotations

import math

import numpy as np

from tests.oracles.decoder import Oracle
from tests.oracles.evict_every import EvictEvery


class Critical(EvictEvery):
    """`output` are the weights of attention's output. A norm is that of the value before it is coded."""

    epsilon: float

    def start(self):
        super().start()
        self.norms: list[dict[int, float]] = [{} for _ in range(self.kv_heads)]

    def read(self, prompt):
        super().read(prompt)
        for h in range(self.kv_heads):
            for i, value in enumerate(prompt.values[h]):
                self.norms[h][i] = self.norm(h, value)

    def note(self, h, new):
        self.norms[h][new.position] = self.norm(h, new.values[h])
        return super().note(h, new)

    def norm(self, h: int, value: np.ndarray) -> float:
        """The mean over a group of the sum of what the value would add to each channel of the hidden state."""
        d, total = len(value), 0.0
        for g in range(self.groups):
            first = (h * self.groups + g) * d
            total += sum(abs(float(row[first : first + d] @ value)) for row in self.output)
        return total / self.groups

    def contest(self, h, new):
        return self.with_protected(h, new, super().scores(h, new))

    def scores(self, h, new):
        head, base = self.heads[h], super().scores(h, new)
        free = [
            i
            for i, position in enumerate(head.positions)
            if position >= self.sinks and position <= new.position - self.recents[h]
        ]
        half = max(0, self.limits[h] - self.sinks - self.recents[h]) // 2
        critical = sorted(free, key=lambda i: (base[i], i), reverse=True)[:half]
        found = []
        for i, (s, position) in enumerate(zip(base, head.positions, strict=True)):
            ranked = abs(s) < 1e30  # other numbers of the base only say who is first or last
            scaled = (s + self.epsilon) * self.norms[h][position] if ranked else s
            found.append(math.inf if i in critical else scaled)
        return found


def critical(kind: type[Oracle]) -> type[Oracle]:
    """CriticalKV over a policy."""
    return type(f"Critical{kind.__name__}", (Critical, kind), {})
