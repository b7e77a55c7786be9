"""Oracles of the baselines: full, window, streaming, random, H2O."""

from __future__ import annotations

import numpy as np

from tests.oracles.decoder import Oracle


class Full(Oracle):
    """Nothing leaves: the limit is the whole text."""

    def scores(self, h, new):
        return [0.0] * len(self.heads[h].positions)


class Window(Oracle):
    """The oldest leaves; with sinks and cache positions this is StreamingLLM."""

    def scores(self, h, new):
        return self.heads[h].positions


class Random(Oracle):
    """Each token of each head draws one number, the smallest leaves; `uniform` [h, positions] is injected."""

    uniform: np.ndarray

    def scores(self, h, new):
        return [self.uniform[h, position] for position in self.heads[h].positions]


class H2O(Oracle):
    """Heavy hitters: a token's note is all attention it ever got, from every query head of its group."""

    def read(self, prompt):
        for h, head in enumerate(self.heads):
            for i in range(prompt.prompt_length):
                head.notes[i] = 0.0
                for g in range(self.groups):
                    for query in range(i, prompt.prompt_length):
                        head.notes[i] += prompt.probs[h][g][query, i]

    def note(self, h, new):
        return 0.0

    def after(self, new, probs):
        for h, head in enumerate(self.heads):
            for i in range(len(head.notes)):
                for g in range(self.groups):
                    head.notes[i] += probs[h][g][i]

    def scores(self, h, new):
        return self.heads[h].notes


class DilatedWindow(Oracle):
    """Tokens in the gaps of the pattern leave before those on it, the oldest of each first."""

    dilation: int

    def scores(self, h, new):
        positions = self.heads[h].positions
        gap = [position % (self.dilation + 1) != 0 for position in positions]
        return [position - 1e9 if g else position for position, g in zip(positions, gap, strict=True)]
