"""Hamming distances: cases, and the operation bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_kernels.hamming import hamming
from tests.kernel_cases.evict import positions, protection, victim
from tests.kernels import TPU_WAYS, XLA, Case


def oracle(inputs: dict[str, Any]) -> dict[str, Any]:
    """The victim of equation 6."""
    scores = nearness(inputs["query"], inputs["codes"])
    b, h, _ = scores.shape
    return {"slot": np.array([[victim(inputs, scores, row, head) for head in range(h)] for row in range(b)])}


def nearness(query: np.ndarray, codes: Sequence[np.ndarray]) -> np.ndarray:
    """Minus the bits in which codes differ from those of a group's queries (equation 5)."""
    words = query[:, :, :, None] ^ np.stack(codes, axis=-1)[:, :, None]
    return -np.unpackbits(words.view(np.uint8), axis=-1).sum((2, -1)).astype(np.float64)


def hashed(planes: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Codes of vectors [b h n d] (equation 2), 32 bits to a word, the first one lowest."""
    signs = np.einsum("bhnd,hkd->bhnk", x, planes) >= 0
    packed = np.packbits(signs, axis=-1, bitorder="little")
    padded = np.pad(packed, [(0, 0)] * 3 + [(0, -packed.shape[-1] % 4)])
    return np.ascontiguousarray(padded).view("<u4").astype(np.uint32)


def words(rng: np.random.Generator, bits: int, *shape: int) -> np.ndarray:
    """Random words of a code; few bits give many equal distances."""
    return rng.integers(2 ** min(bits, 32), size=shape, dtype=np.uint32)


def run(inputs: dict[str, Any], **options: Any) -> dict[str, Any]:
    inputs = dict(inputs)
    arrays = [inputs.pop(name) for name in ("query", "codes", "position", "new_position")]
    return {"slot": hamming(*arrays, **inputs, **options)}


def case(b: int, h: int, g: int, c: int, bits: int, *, live: str = "full", keep: bool = False) -> Case:
    """Random codes."""
    rng = np.random.default_rng(b + h + g + c + bits)
    position, new = positions(rng, b, h, c, live)
    count = -(-bits // 32)
    inputs: dict[str, Any] = {"query": words(rng, bits, b, h, g, count)}
    inputs["codes"] = tuple(words(rng, bits, count, b, h, c))
    inputs |= {"position": position, "new_position": new, "protection": protection(rng, b, h, c)}
    if keep:
        inputs["keep"] = rng.random((b, h, c)) < 0.3
    label = f"{b}x{h}x{g}x{c}-{bits}bits-{live}" + ("-keep" if keep else "")
    return Case("hamming", label, (inputs,), run, oracle, ways=(XLA, *TPU_WAYS))


CASES = (
    case(2, 2, 4, 48, 16),
    case(2, 8, 1, 200, 64, live="ragged"),
    case(1, 3, 2, 33, 4),
    case(1, 2, 2, 16, 32, live="one"),
    case(1, 2, 2, 16, 32, live="none"),
    case(1, 2, 4, 48, 16, keep=True),
)
