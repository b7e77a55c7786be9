"""TriAttention: keys before rotation as complex numbers, and what an average query ahead would make of them."""

from __future__ import annotations

import cmath
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Complex, Float

from tests.oracles.decoder import Prompt
from tests.oracles.evict_every import EvictEvery


def pairs(x: Float[np.ndarray, "*b d"], rope: Any) -> Complex[np.ndarray, "*b f"]:
    """The two channels that RoPE turns together."""
    if rope.interleaved:
        return x[..., 0 : rope.width : 2] + 1j * x[..., 1 : rope.width : 2]
    half = rope.width // 2
    return x[..., :half] + 1j * x[..., half : rope.width]


def turns(rope: Any) -> Float[np.ndarray, " f"]:
    """Radians of each pair for each position."""
    return rope.theta ** (-np.arange(0, rope.width, 2) / rope.width)


class Mean(NamedTuple):
    """What is known of a query head."""

    center: Complex[np.ndarray, " f"]
    norm: Float[np.ndarray, " f"]
    still: Float[np.ndarray, " r"]
    """Mean of the channels that are not rotated."""


def calibrated(queries: Sequence[Float[np.ndarray, "n d"]], rope: Any) -> Mean:
    """Q and m of a query head, from its rotated queries in some texts."""
    raw, still = [], []
    for text in queries:
        for position, query in enumerate(text):
            raw.append(pairs(query, rope) * np.exp(-1j * position * turns(rope)))
            still.append(query[rope.width :])
    return Mean(np.mean(raw, axis=0), np.mean(np.abs(raw), axis=0), np.mean(still, axis=0))


class TriAttention(EvictEvery):
    """`means` of each head and query head are injected, and the model's `rope`; a note is whether a token was given."""

    means: list[list[Mean]]
    rope: Any
    distances: int
    keep_prompt: bool

    def read(self, prompt):
        for head in self.heads:
            head.notes = [True for _ in head.positions]

    def note(self, h, new):
        return self.given

    def scores(self, h, new):
        head = self.heads[h]
        newest = head.positions[-1] if isinstance(new, Prompt) else new.position - 1
        best = [-np.inf] * len(head.positions)
        for query in self.means[h]:
            held = zip(head.keys, head.positions, strict=True)
            found = [self.attention(query, key, at, newest - at) for key, at in held]
            mean = sum(found) / len(found)
            deviation = np.sqrt(sum((x - mean) ** 2 for x in found) / len(found))
            best = [max(score, (x - mean) / max(deviation, 1e-6)) for score, x in zip(best, found, strict=True)]
        above = [1e3 * (self.keep_prompt and given) for given in head.notes]
        return [score + more for score, more in zip(best, above, strict=True)]

    def attention(self, mean: Mean, key: np.ndarray, position: int, distance: int) -> float:
        turn = turns(self.rope)
        raw = pairs(key, self.rope) * np.exp(-1j * position * turn)
        total = float(mean.still @ key[self.rope.width :])
        for query, length, k, speed in zip(mean.center, mean.norm, raw, turn, strict=True):
            phase = cmath.phase(query * k.conjugate())
            ahead = [np.cos((distance + 2**i) * speed + phase) for i in range(self.distances)]
            total += abs(query) * abs(k) * sum(ahead) / len(ahead) + (length - abs(query)) * abs(k)
        return total
