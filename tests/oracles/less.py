"""The oracle of LESS: Algorithm 1, one evicted pair at a time, equation 3 as printed."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from scipy.special import erf

from tests.oracles.decoder import Oracle
from tests.oracles.residual import Remembering


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))


def phi(weights: dict[str, np.ndarray], q: np.ndarray) -> np.ndarray:
    """Equation 1, the weights of one query head."""
    return np.abs(gelu(gelu(q @ weights["first"]) @ weights["second"]))


def psi(weights: dict[str, np.ndarray], k: np.ndarray) -> np.ndarray:
    """Equation 2 with learned scalars, the weights of one KV head; residual where they have a second scalar."""
    second = np.abs(weights["outer_scale"]) * gelu(gelu(k @ weights["first"]) @ weights["second"])
    third = second @ weights["third"]
    return np.abs(second + weights["residual_scale"] * third) if "residual_scale" in weights else np.abs(third)


def performer(planes: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Positive random features for exp(q k / sqrt(d))."""
    x = x / len(x) ** 0.25
    return np.array([math.exp(w @ x - x @ x / 2) / math.sqrt(len(planes)) for w in planes])


class _Less(Remembering):
    kernels: str
    parameters: Any

    def start(self):
        super().start()
        mine = self.parameters[self.layer]
        self.weights = {name: {k: np.asarray(v, np.float64) for k, v in mine[name].items()} for name in mine}
        self.h: list[np.ndarray | float] = [0.0] * self.kv_heads
        self.z: list[np.ndarray | float] = [0.0] * self.kv_heads

    def phi(self, h, g, q):
        if self.kernels == "performer":
            return performer(self.weights["phi"]["planes"][h], q)
        return phi({name: weight[h, g] for name, weight in self.weights["phi"].items()}, q)

    def psi(self, h, k):
        if self.kernels == "performer":
            return performer(self.weights["psi"]["planes"][h], k)
        return psi({name: weight[h] for name, weight in self.weights["psi"].items()}, k)

    def fold(self, h, i):
        """Equations 4 and 5 for token i of head h, about to leave."""
        features = self.psi(h, self.heads[h].keys[i])
        self.h[h] = self.h[h] + np.outer(features, self.heads[h].values[i])
        self.z[h] = self.z[h] + features

    def total(self, h: int, g: int, query: np.ndarray, logits: np.ndarray) -> float:
        evicted = 0.0 if isinstance(self.z[h], float) else self.phi(h, g, query) @ self.z[h]
        return super().total(h, g, query, logits) + float(evicted)

    def attend(self, h, g, query, probs):
        """Equation 3; while nothing has left, and so for a whole prompt, it is plain attention."""
        if isinstance(self.z[h], float):
            return super().attend(h, g, query, probs)
        features = self.phi(h, g, query)
        return self.beside(h, g, probs, features @ self.h[h], float(features @ self.z[h]))


@functools.cache
def less(base: type[Oracle]) -> type[Oracle]:
    """LESS over an oracle."""
    return type(f"Less{base.__name__}", (_Less, base), {})
