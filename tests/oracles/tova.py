"""TOVA: a token's note is the attention that the last query paid it, averaged over all heads of the layer."""

from __future__ import annotations

from tests.oracles.decoder import Oracle


class Tova(Oracle):
    def read(self, prompt):
        for head in self.heads:
            for i in range(prompt.prompt_length):
                total = 0.0
                for h in range(self.kv_heads):
                    for g in range(self.groups):
                        total += prompt.probs[h][g][-1, i]
                head.notes[i] = total / (self.kv_heads * self.groups)

    def note(self, h, new):
        return 0.0

    def after(self, new, probs):
        for head in self.heads:
            for i in range(len(head.notes)):
                total = 0.0
                for h in range(self.kv_heads):
                    for g in range(self.groups):
                        total += probs[h][g][i]
                head.notes[i] = total / (self.kv_heads * self.groups)

    def scores(self, h, new):
        return self.heads[h].notes
