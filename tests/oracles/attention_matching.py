"""The oracle of Attention Matching: one head at a time, with the keys that stay in a list."""

from __future__ import annotations

import functools
import math

import numpy as np

from tests.oracles.codecs import rounded
from tests.oracles.decoder import Oracle


def mean_square(columns: np.ndarray) -> float:
    """The mean of the squared lengths of columns."""
    return np.mean((columns**2).sum(0))


def ridge_regression(inputs: np.ndarray, outputs: np.ndarray, weight: float) -> np.ndarray:
    """The x of least |inputs x - outputs|^2 + weight |x|^2."""
    return np.linalg.solve(inputs.T @ inputs + weight * np.eye(inputs.shape[1]), inputs.T @ outputs)


def factors_of(kept: np.ndarray, mass: np.ndarray, weight: float, bound: float) -> np.ndarray:
    """The B of least |M B - m|^2 from e^-bound to e^bound: clipped least squares around 1, and two projected steps."""
    box = math.exp(-bound), math.exp(bound)
    factors = np.clip(1 + ridge_regression(kept, mass - kept.sum(1), weight), *box)
    step = 1 / np.abs(kept.T @ kept).sum(1).max()
    for _ in range(2):
        factors = np.clip(factors - step * kept.T @ (kept @ factors - mass), *box)
    return factors


def places_of(count: int, most: int) -> list[int]:
    """The queries of a text that are matched, at even distances."""
    return list(range(count)) if count < most else [(2 * i + 1) * count // (2 * most) for i in range(most)]


class _AttentionMatching(Oracle):
    evicts_first = True
    codec: str
    queries: int
    ridge: float
    bound: float

    def start(self):
        super().start()
        self.added: list[dict[int, float]] = [{} for _ in range(self.kv_heads)]
        """The bias of each position of a head."""

    def bias(self, h, g, places):
        return super().bias(h, g, places) + np.array([self.added[h].get(place, 0.0) for place in places])

    def keep(self, prompt):
        staying = super().keep(prompt)
        for h in range(self.kv_heads):
            if len(staying[h]) < len(self.heads[h].positions):
                self.match(h, prompt, sorted(staying[h]))
        return staying

    def match(self, h: int, prompt, staying: list[int]) -> None:
        head = self.heads[h]
        at = places_of(len(prompt.tokens), self.queries)
        queries = np.concatenate([prompt.queries[h][g][at] for g in range(self.groups)])
        keys, values = np.array(head.keys), np.array(head.values)
        bias = np.array([self.added[h].get(position, 0.0) for position in head.positions])
        logits = queries @ keys.T / math.sqrt(keys.shape[1]) + bias
        numbers = np.exp(logits - logits.max(1, keepdims=True))
        kept, mass = numbers[:, staying], numbers.sum(1)
        factors = factors_of(kept, mass, self.ridge * mean_square(kept), self.bound)
        weights = kept * factors / (kept * factors).sum(1, keepdims=True)
        missing = numbers @ values / mass[:, None] - weights @ values[staying]
        changes = ridge_regression(weights, missing, self.ridge * mean_square(weights))
        for i, change, factor in zip(staying, changes, factors, strict=True):
            value = head.values[i] + change
            head.values[i] = value if self.codec == "plain" else rounded(value, self.codec)
            position = head.positions[i]
            self.added[h][position] = self.added[h].get(position, 0.0) + math.log(factor)


@functools.cache
def attention_matching(base: type[Oracle]) -> type[Oracle]:
    """Attention Matching over an oracle."""
    return type(f"AttentionMatching{base.__name__}", (_AttentionMatching, base), {})
