"""Methods that rank a prompt or a turn once, from keys, values and queries, each by its equation."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float

from tests.oracles.decoder import Oracle, Prompt, softmax

LOWEST = -1e30
"""Score of generated tokens."""


def rotated(rope, x: Float[np.ndarray, " d"], position: float) -> Float[np.ndarray, " d"]:
    """A vector turned to a position, pair by pair."""
    if rope is None:
        return x
    turned, half = x.copy(), rope.width // 2
    for pair in range(half):
        one, other = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, pair + half)
        angle = position * rope.theta ** (-pair / half)
        turned[one] = x[one] * math.cos(angle) - x[other] * math.sin(angle)
        turned[other] = x[other] * math.cos(angle) + x[one] * math.sin(angle)
    return turned


class PromptRanked(Oracle):
    """A token's note is its score, of the last text that was given; `rope` of the layer is injected."""

    rope: object

    def read(self, prompt):
        for head in self.heads:
            head.notes = [LOWEST] * len(head.positions)

    def note(self, h, new):
        return LOWEST

    def scores(self, h, new):
        if isinstance(new, Prompt):
            self.heads[h].notes = self.ranked(h, new)
        return self.heads[h].notes

    def ranked(self, h: int, text: Prompt) -> list[float]:
        """Scores of what head h holds at the end of a text."""
        raise NotImplementedError


class WithQueries(PromptRanked):
    """Remembers the given queries of each query head before rotation."""

    future: int

    def start(self):
        super().start()
        self.known = [[{} for _ in range(self.groups)] for _ in range(self.kv_heads)]

    def raw_queries(self, h: int, g: int, text: Prompt) -> Float[np.ndarray, "n d"]:
        """All given queries past the sinks."""
        for i, query in enumerate(text.queries[h][g]):
            self.known[h][g][text.start + i] = rotated(self.rope, query, -(text.start + i))
        queries = [query for position, query in sorted(self.known[h][g].items()) if position >= self.sinks]
        return np.array(queries).reshape(len(queries), -1)

    def rotation(self, width: int, text: Prompt) -> Float[np.ndarray, "d d"]:
        """Mean matrix of the rotations to the next positions."""
        ahead = range(text.prompt_length, text.prompt_length + self.future)
        return np.mean([[rotated(self.rope, unit, p) for unit in np.eye(width)] for p in ahead], axis=0).T


class ExpectedAttention(WithQueries):
    epsilon: float

    def ranked(self, h, text):
        head = self.heads[h]
        later = [i for i, position in enumerate(head.positions) if position >= self.sinks]
        attention = dict.fromkeys(range(len(head.positions)), 0.0)
        for g in range(self.groups):
            queries = self.raw_queries(h, g, text)
            if not later:
                continue
            width = queries.shape[1]
            rotation = self.rotation(width, text)
            mean = rotation @ queries.mean(0)
            covariance = rotation @ np.cov(queries.T, bias=True) @ rotation.T
            logits = []
            for i in later:
                key = head.keys[i]
                logits.append(key @ mean / math.sqrt(width) + key @ covariance @ key / (2 * width))
            for i, share in zip(later, softmax(np.array(logits)), strict=True):
                attention[i] += share / self.groups
        return [(attention[i] + self.epsilon) * math.sqrt(sum(head.values[i] ** 2)) for i in range(len(head.positions))]


class LagKV(PromptRanked):
    lag: int

    def ranked(self, h, text):
        head = self.heads[h]
        found = [1.0] * len(head.positions)
        whole = (len(found) - self.sinks) // self.lag
        for number in range(whole - 1):
            own = range(self.sinks + number * self.lag, self.sinks + (number + 1) * self.lag)
            scores = [0.0] * self.lag
            for vectors in (head.keys, head.values):
                following = np.array([vectors[i + self.lag] for i in own])
                low, high = following.min(0), following.max(0)
                spread = [np.std((vectors[i] - low) / (high - low), ddof=1) for i in own]
                scores = [score + share / 2 for score, share in zip(scores, softmax(np.array(spread)), strict=True)]
            for rank, place in enumerate(sorted(range(self.lag), key=lambda place: scores[place])):
                found[own[place]] = rank / self.lag
        return found
