"""SimLayerKV: a layer whose last query looks at the ends of the prompt keeps them alone."""

from __future__ import annotations

from tests.oracles.basic import Window


class SimLayerKV(Window):
    threshold: float
    initial: int
    newest: int

    def read(self, prompt):
        n, total = prompt.prompt_length, 0.0
        for h in range(self.kv_heads):
            for g in range(self.groups):
                ends = [i for i in range(n) if i < self.initial or i > n - 1 - self.newest]
                total += sum(prompt.probs[h][g][n - 1, i] for i in ends)
        mass = total / (self.kv_heads * self.groups)
        if mass > self.threshold and self.threshold < 1 and n > self.initial + self.newest:
            # The token being read has one of the slots, unless it takes it first.
            slots = self.initial + self.newest - (0 if self.evicts_first else 1)
            self.limits = [min(slots, limit) for limit in self.limits]
