"""Oracles of LESS (Algorithm 1, one evicted pair at a time, equation 3 as printed) and of Baseline+."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
from scipy.special import erf

from tests.oracles.decoder import Oracle


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


class Wrapped(Oracle):
    """An oracle that finds its settings in the policy `base`."""

    base: Any

    def __init__(self, **attributes):
        base = attributes["base"]
        settings = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
        super().__init__(**{**settings, **attributes})


class _Less(Wrapped):
    kernel: str
    kernels: Any
    theta: float

    def start(self):
        super().start()
        mine = self.kernels[self.layer]
        self.weights = {name: {k: np.asarray(v, np.float64) for k, v in mine[name].items()} for name in mine}
        self.h: list[np.ndarray | float] = [0.0] * self.kv_heads
        self.z: list[np.ndarray | float] = [0.0] * self.kv_heads
        self.newest = None

    def phi(self, h, g, q):
        if self.kernel == "performer":
            return performer(self.weights["phi"]["planes"][h], q)
        return phi({name: weight[h, g] for name, weight in self.weights["phi"].items()}, q)

    def psi(self, h, k):
        if self.kernel == "performer":
            return performer(self.weights["psi"]["planes"][h], k)
        return psi({name: weight[h] for name, weight in self.weights["psi"].items()}, k)

    def fold(self, h, i):
        """Equations 4 and 5 for token i of head h, about to leave."""
        features = self.psi(h, self.heads[h].keys[i])
        self.h[h] = self.h[h] + np.outer(features, self.heads[h].values[i])
        self.z[h] = self.z[h] + features

    def keep(self, prompt):
        staying = super().keep(prompt)
        for h in range(self.kv_heads):
            for i in range(prompt.prompt_length):
                if i not in staying[h]:
                    self.fold(h, i)
        return staying

    def before(self, new):
        leaving = super().before(new)
        for h in range(self.kv_heads):
            if leaving[h] is not None:
                self.fold(h, leaving[h])
        self.newest = new.position
        return leaving

    def attend(self, h, g, query, probs):
        """Equation 3; while nothing has left, and so for a whole prompt, it is plain attention."""
        head = self.heads[h]
        if isinstance(self.z[h], float):
            return probs @ np.array(head.values)
        seen, keys = query, head.keys
        if self.positions == "cache":
            assert self.newest is not None
            seen = self.turn(query, len(head.keys) - 1 - self.newest)
            keys = [self.turn(key, i) for i, key in enumerate(head.raw_keys)]
        features = self.phi(h, g, query)
        above, below = features @ self.h[h], features @ self.z[h]
        for key, value in zip(keys, head.values, strict=True):
            weight = math.exp(seen @ key / math.sqrt(len(key)))
            above, below = above + weight * value, below + weight
        return above / below

    def turn(self, x, by):
        """Rotate a vector on by some positions."""
        half = len(x) // 2
        turned = (x[:half] + 1j * x[half:]) * np.exp(1j * by * self.theta ** (-np.arange(half) / half))
        return np.concatenate([turned.real, turned.imag])


@functools.cache
def less(base: type[Oracle]) -> type[Oracle]:
    """LESS over an oracle; the case injects `theta`, the base of the rotary wavelengths."""
    return type(f"Less{base.__name__}", (_Less, base), {})


@functools.cache
def wrapped(base: type[Oracle]) -> type[Oracle]:
    """An oracle for a wrapper that changes nothing but the limit."""
    return type(f"Wrapped{base.__name__}", (Wrapped, base), {})
