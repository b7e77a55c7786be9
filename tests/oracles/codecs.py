"""The oracle of quantized slots: what a slot holds is rounded to 8 or 4 bits and read as it was rounded."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
from jaxtyping import Float

from tests.oracles.decoder import Oracle

Vector = Float[np.ndarray, " d"]


def rounded(x: Vector, codec: str) -> Vector:
    """The largest number is 127 or 7 steps from zero, and every number goes to the nearest step; or to e4m3's."""
    if codec == "fp8":
        return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(x.dtype)
    step = max(np.abs(x).max(), np.finfo(np.float32).tiny) / {"int8": 127, "int4": 7}[codec]
    return np.round(x / step) * step


def channel_factors(keys: Float[np.ndarray, "n d"]) -> Vector:
    """The power of two nearest to each channel's root mean square, none below a thousandth of the loudest channel."""
    loudness = np.sqrt(np.mean(keys**2, axis=0))
    return 2 ** np.round(np.log2(np.maximum(loudness, loudness.max() / 1000)))


class _Coded(Oracle):
    codec: str

    def start(self):
        super().start()
        self.factors: list[Vector | None] = [None] * self.kv_heads

    def lay(self, prompt):
        # A text attends to its own pairs as they are; then they are rounded, those that leave, too.
        for h, head in enumerate(self.heads):
            if prompt.start == 0 and len(prompt.tokens) >= 8 and self.levelled:
                self.factors[h] = channel_factors(prompt.keys[h])
            for i, position in enumerate(head.positions):
                if position >= prompt.start:
                    head.keys[i], head.values[i] = self.store(h, head.keys[i], head.values[i])

    def keep(self, prompt):
        self.lay(prompt)
        return super().keep(prompt)

    def store(self, h, key, value):
        if self.given:
            return key, value
        return self.key(h, key), rounded(value, self.codec)

    def key(self, h: int, key: Vector) -> Vector:
        factor = self.factors[h]
        # A first text of fewer than 8 tokens, as one that is read token by token, gives no factors.
        return rounded(key, self.codec) if factor is None else rounded(key / factor, self.codec) * factor

    def see(self, h, new, raw, turn):
        """Under cache positions only the sinks move, to right before the window; for a text they are rounded again."""
        head = self.heads[h]
        gap = new.position + 1 - len(head.positions) if self.positions == "cache" else 0

        def moved(key):
            return self.key(h, turn(key, gap)) if self.given else turn(key, gap)

        held = zip(head.positions, head.keys, strict=True)
        keys = [moved(key) if gap and position < self.sinks else key for position, key in held]
        return np.array(keys), new.queries[h]


@functools.cache
def coded(base: type[Oracle]) -> type[Oracle]:
    """An oracle over codes."""
    return type(f"Coded{base.__name__}", (_Coded, base), {})
