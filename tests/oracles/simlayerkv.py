"""SimLayerKV: a layer whose last query looks at the ends of the prompt keeps them alone."""

from __future__ import annotations

from tests.oracles.basic import Window


class SimLayerKV(Window):
    threshold: float
    initial: int
    newest: int

    def protected(self, h, i, newest):
        position = self.heads[h].positions[i]
        return position < self.sinks or position > newest - self.recents[h]

    def scores(self, h, new):
        """Special tokens leave last, the oldest of them first: a generated one takes its slot."""
        tokens = self.heads[h].tokens
        return [10**30 if token in self.special else s for token, s in zip(tokens, super().scores(h, new), strict=True)]

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
            slots += sum(token in self.special for token in prompt.tokens[self.initial :])
            self.limits = [min(slots, limit) for limit in self.limits]
