"""Methods that rank a prompt or a turn once, from keys, values and queries, each by its equation."""

from __future__ import annotations

import functools
import math

import numpy as np
from jaxtyping import Float

from tests.oracles.attention_matching import factors_of, mean_square, places_of
from tests.oracles.decoder import Oracle, Prompt, magnitude, softmax
from tests.oracles.plans import recent_window

LOWEST = -1e30
"""Score of generated tokens."""


def rotated(rope, x: Float[np.ndarray, " d"], position: float, back: bool = False) -> Float[np.ndarray, " d"]:
    """A vector turned to a position, pair by pair, or turned back from it."""
    if rope is None:
        return x
    position, longer = (-position, 1 / magnitude(rope)) if back else (position, magnitude(rope))
    turned, half = x.copy(), rope.width // 2
    for pair in range(half):
        one, other = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, pair + half)
        angle = position * rope.theta ** (-pair / half)
        turned[one] = (x[one] * math.cos(angle) - x[other] * math.sin(angle)) * longer
        turned[other] = (x[other] * math.cos(angle) + x[one] * math.sin(angle)) * longer
    return turned


class PromptRanked(Oracle):
    """A token's note is its score, of the last text that was given; `rope` of the layer is injected."""

    rope: object

    def start(self):
        self.texts: list[Prompt | None] = [None] * self.kv_heads

    def read(self, prompt):
        for head in self.heads:
            head.notes = [LOWEST] * len(head.positions)

    def note(self, h, new):
        return LOWEST

    def scores(self, h, new):
        if isinstance(new, Prompt) and new is not self.texts[h]:
            self.texts[h] = new
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
            self.known[h][g][text.start + i] = rotated(self.rope, query, text.start + i, back=True)
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


class OMP(PromptRanked):
    """Keys are chosen one after another by what they explain of the mass that is missing; the rest scores 0."""

    queries: int
    each: int
    ridge: float

    def ranked(self, h, text):
        keys = np.array(self.heads[h].keys)
        at = places_of(len(text.tokens), self.queries)
        queries = np.concatenate([text.queries[h][g][at] for g in range(self.groups)])
        logits = queries @ keys.T / math.sqrt(keys.shape[1])
        phi = np.exp(logits - logits.max(1, keepdims=True))
        mass = phi.sum(1)
        found, chosen, missing = [0.0] * len(keys), [], mass
        rounds = math.ceil(min(self.most, len(keys)) / self.each)
        for number in range(rounds):
            gains = phi.T @ missing
            left = sorted((i for i in range(len(keys)) if i not in chosen), key=lambda i: -gains[i])
            for place, i in enumerate(left[: self.each]):
                found[i] = 1 - (number * self.each + place) / (rounds * self.each)
                chosen.append(i)
            missing = mass - phi[:, chosen] @ factors_of(phi[:, chosen], mass, self.ridge * mean_square(phi), 7)
        return found

    @property
    def most(self) -> int:
        """Slots of the largest head."""
        return max(self.limits) + (0 if self.evicts_first else 1)


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


class OfText(PromptRanked):
    """Scores of a text's own tokens; what has been ranked before keeps its score, and other held tokens score 0."""

    def read(self, prompt):
        super().read(prompt)
        self.turned(prompt)

    def turned(self, turn):
        # Pairs as they are before a codec rounds them.
        self.pairs = [(list(head.keys), list(head.values)) for head in self.heads]

    def ranked(self, h, text):
        head = self.heads[h]
        slots = self.limits[h] + (0 if self.evicts_first else 1)
        end = text.prompt_length - recent_window(self.recent, slots)
        new = [i for i, position in enumerate(head.positions) if max(self.sinks, text.start) <= position < end]
        found = [0.0 if note == LOWEST else note for note in head.notes]
        for i, position in enumerate(head.positions):
            if position >= text.start:
                found[i] = LOWEST
        for i, score in zip(new, self.of_text(h, new, text) if new else [], strict=True):
            found[i] = score
        return found

    def of_text(self, h: int, new: list[int], text: Prompt) -> list[float]:
        """Scores of these tokens of head h."""
        raise NotImplementedError

    @staticmethod
    def standard(scores: list[float]) -> list[float]:
        """z-scores."""
        mean = sum(scores) / len(scores)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in scores) / len(scores))
        return [(x - mean) / max(deviation, 1e-6) for x in scores]


class Leverage(OfText):
    projections: np.ndarray

    def of_text(self, h, new, text):
        head = self.heads[h]
        keys = np.array([head.raw_keys[i] for i in new])
        x = (keys - keys.mean(0)) @ self.projections[h]
        inverse = np.linalg.inv(x.T @ x + 0.01 * np.eye(x.shape[1]))
        return self.standard([row @ inverse @ row for row in x])


class NonCausal(OfText):
    chunk: int

    def of_text(self, h, new, text):
        positions, (held, values) = self.heads[h].positions, self.pairs[h]
        paid = [0.0] * len(new)
        for begin in range(0, len(new), self.chunk):
            chunk = range(begin, min(begin + self.chunk, len(new)))
            keys = np.array([held[new[j]] for j in chunk])
            for g in range(self.groups):
                for t in chunk:
                    query = text.queries[h][g][positions[new[t]] - text.start]
                    for j, share in zip(chunk, softmax(keys @ query / math.sqrt(len(query))), strict=True):
                        paid[j] += share / self.groups
        paid = [0.0, *(x * float(np.linalg.norm(values[i])) for x, i in zip(paid, new, strict=True)), 0.0]
        return self.standard([sum(paid[j : j + 3]) / 3 for j in range(len(new))])


class Compactor(Leverage, NonCausal):
    blending: float | None

    def of_text(self, h, new, text):
        slots = self.limits[h] + (0 if self.evicts_first else 1)
        share = max(0.0, 1 - slots / len(self.heads[h].positions))
        both = zip(Leverage.of_text(self, h, new, text), NonCausal.of_text(self, h, new, text), strict=True)
        return [share * leverage + attention for leverage, attention in both]


class CapKV(WithQueries):
    tau: float

    def ranked(self, h, text):
        head = self.heads[h]
        found = [0.0] * len(head.positions)
        later = [i for i, position in enumerate(head.positions) if position >= self.sinks]
        for g in range(self.groups):
            queries = self.raw_queries(h, g, text)
            if not later:
                continue
            mean = self.rotation(queries.shape[1], text) @ queries.mean(0)
            cosines = [head.keys[i] @ mean / np.linalg.norm(head.keys[i]) / np.linalg.norm(mean) for i in later]
            weights = [math.exp(self.tau * (cosine - max(cosines))) for cosine in cosines]
            capacity = np.eye(len(head.values[0]))
            for i, weight in zip(later, weights, strict=True):
                capacity += weight * np.outer(head.values[i], head.values[i])
            inverse = np.linalg.inv(capacity)
            for i, weight in zip(later, weights, strict=True):
                found[i] += weight * float(head.values[i] @ inverse @ head.values[i]) / self.groups
        return found


@functools.cache
def chunked(base: type[Oracle]) -> type[Oracle]:
    """ChunkKV over another policy: every held token of a chunk scores what they score together."""

    class Chunked(base):
        length: int

        def start(self):
            super().start()
            self.sums: list[dict[int, float]] = [{} for _ in range(self.kv_heads)]

        def scores(self, h, new):
            positions = self.heads[h].positions
            if isinstance(new, Prompt):
                own = list(zip(positions, super().scores(h, new), strict=True))
                for position in positions:
                    chunk = [score for other, score in own if other // self.length == position // self.length]
                    self.sums[h][position] = sum(min(score, 1e30) for score in chunk if score > LOWEST)
            return [self.sums[h].get(position, LOWEST) for position in positions]

    return Chunked
