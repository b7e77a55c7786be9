"""SimLayerKV: a layer whose last query looks at the ends of the prompt keeps them alone."""

from __future__ import annotations

from tests.oracles.basic import Window


class SimLayerKV(Window):
    threshold: float
    sinks: int
    recent: int  # type: ignore[assignment]
    length: int

    def protected(self, h, i, newest):
        """Special tokens of the prompt, too, but none that are generated."""
        position = self.heads[h].positions[i]
        special = self.heads[h].tokens[i] in self.special and position < self.length
        return special or position < self.sinks or position > newest - self.recents[h]

    def read(self, prompt):
        self.length = prompt.prompt_length
        n, total = prompt.prompt_length, 0.0
        for h in range(self.kv_heads):
            for g in range(self.groups):
                ends = [i for i in range(n) if i < self.sinks or i > n - 1 - self.recent]
                total += sum(prompt.probs[h][g][n - 1, i] for i in ends)
        mass = total / (self.kv_heads * self.groups)
        if mass > self.threshold and self.threshold < 1 and n > self.sinks + self.recent:
            # The token being read has one of the slots, unless it takes it first.
            slots = self.sinks + self.recent - (0 if self.evicts_first else 1)
            slots += sum(token in self.special for token in prompt.tokens[self.sinks :])
            self.limits = [min(slots, limit) for limit in self.limits]
