"""TriAttention: keys before rotation as complex numbers, and what an average query ahead would make of them."""

from __future__ import annotations

import cmath
from collections.abc import Sequence

import numpy as np
from jaxtyping import Complex, Float

from tests.oracles.decoder import Prompt
from tests.oracles.evict_every import EvictEvery


def pairs(x: Float[np.ndarray, "*b d"]) -> Complex[np.ndarray, "*b f"]:
    """The two channels that RoPE turns together."""
    half = x.shape[-1] // 2
    return x[..., :half] + 1j * x[..., half:]


def turns(width: int, theta: float) -> Float[np.ndarray, " f"]:
    """Radians of each pair for each position."""
    return theta ** (-np.arange(0, width, 2) / width)


def calibrated(
    queries: Sequence[Float[np.ndarray, "n d"]], theta: float
) -> tuple[Complex[np.ndarray, " f"], Float[np.ndarray, " f"]]:
    """Q and m of a query head, from its rotated queries in some texts."""
    raw = []
    for text in queries:
        for position, query in enumerate(text):
            raw.append(pairs(query) * np.exp(-1j * position * turns(len(query), theta)))
    return np.mean(raw, axis=0), np.mean(np.abs(raw), axis=0)


class TriAttention(EvictEvery):
    """`centers` and `norms` of each head and query head are injected, and RoPE's `theta`."""

    centers: list[list[np.ndarray]]
    norms: list[list[np.ndarray]]
    theta: float
    distances: int
    keep_prompt: bool

    def scores(self, h, new):
        head = self.heads[h]
        newest = head.positions[-1] if isinstance(new, Prompt) else new.position - 1
        best = [-np.inf] * len(head.positions)
        for center, norm in zip(self.centers[h], self.norms[h], strict=True):
            held = zip(head.keys, head.positions, strict=True)
            found = [self.attention(center, norm, key, at, newest - at) for key, at in held]
            mean = sum(found) / len(found)
            deviation = np.sqrt(sum((x - mean) ** 2 for x in found) / len(found))
            best = [max(score, (x - mean) / max(deviation, 1e-6)) for score, x in zip(best, found, strict=True)]
        prompt = [self.keep_prompt and position < new.prompt_length for position in head.positions]
        return [np.inf if stays else score for stays, score in zip(prompt, best, strict=True)]

    def attention(self, center, norm, key: np.ndarray, position: int, distance: int) -> float:
        turn = turns(len(key), self.theta)
        total = 0.0
        for query, length, k, speed in zip(center, norm, pairs(key) * np.exp(-1j * position * turn), turn, strict=True):
            phase = cmath.phase(query * k.conjugate())
            ahead = [np.cos((distance + 2**i) * speed + phase) for i in range(self.distances)]
            total += abs(query) * abs(k) * sum(ahead) / len(ahead) + (length - abs(query)) * abs(k)
        return total
