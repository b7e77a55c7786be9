"""Keyformer, Algorithm 1: a token's note is its accumulated score f."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import numpy as np

from tests.oracles.decoder import Oracle


class Keyformer(Oracle):
    """`uniform(query)` [h, positions] is injected: the numbers from which the noise of each token is made."""

    noise: str
    tau_init: float
    tau_end: float
    damping: float
    shared: bool
    fresh_noise: bool
    uniform: Callable[[int], np.ndarray]

    def zeta(self, h: int, position: int, query: int) -> float:
        u = float(self.uniform(query)[h, position])
        if self.noise == "gumbel":
            return -math.log(-math.log(u))
        if self.noise == "gaussian":
            euler, variance = 0.5772156649015329, math.pi**2 / 6  # those of the Gumbel distribution (appendix)
            return statistics.NormalDist(euler, math.sqrt(variance)).inv_cdf(u)
        return 1.0 if self.noise == "constant" else 0.0

    def softmax(self, h: int, probs: np.ndarray, positions: list[int], query: int, tau: float) -> list[float]:
        """Equation 9 over the tokens that the query sees; log p is x up to a constant, which cancels."""
        exponentials = []
        for p, position in zip(probs, positions, strict=True):
            x = math.log(p) if p > 0 else -math.inf
            exponentials.append(math.exp((x + self.zeta(h, position, query)) / tau))
        return [e / sum(exponentials) for e in exponentials]

    def read(self, prompt):
        for h, head in enumerate(self.heads):
            head.notes = [0.0] * prompt.prompt_length
            for query in range(prompt.prompt_length):
                head.notes = [self.damping * f for f in head.notes]
                for g in range(self.groups):
                    seen = head.positions[: query + 1]
                    row = self.softmax(h, prompt.probs[h][g][query, : query + 1], seen, query, self.tau_init)
                    for i, value in enumerate(row):
                        head.notes[i] += value

    def note(self, h, new):
        return 0.0

    def after(self, new, probs):
        # The first generated token is step 1; a prompt read token by token has tau_init.
        t = min(max(new.position - new.prompt_length + 1, 0), new.horizon)
        tau = self.tau_init + t * (self.tau_end - self.tau_init) / new.horizon
        for h, head in enumerate(self.heads):
            head.notes = [self.damping * f for f in head.notes]
            for g in range(self.groups):
                row = self.softmax(h, probs[h][g], head.positions, new.position, tau)
                for i, value in enumerate(row):
                    head.notes[i] += value

    def scores(self, h, new):
        return self.heads[h].notes


class Shared(Keyformer):
    """One score for all layers: what each layer added to its own notes is added up, and all get the sum."""

    @staticmethod
    def couple(oracles):
        damping = oracles[0].damping
        for h in range(oracles[0].kv_heads):
            count = len(oracles[0].heads[h].notes)
            for i in range(count):
                old = oracles[0].known(h, i)
                total = damping * old
                for oracle in oracles:
                    total += oracle.heads[h].notes[i] - damping * old
                for oracle in oracles:
                    oracle.heads[h].notes[i] = total
        for oracle in oracles:
            oracle.totals = [dict(zip(head.positions, head.notes, strict=True)) for head in oracle.heads]

    def known(self, h: int, i: int) -> float:
        """The score of all layers before this token was read."""
        totals = getattr(self, "totals", [{}] * self.kv_heads)
        return totals[h].get(self.heads[h].positions[i], 0.0)
