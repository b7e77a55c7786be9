"""Phi and psi of LESS: cases, and both in float64 NumPy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from scipy.special import erf

from pallas_kernels import less_memory
from pallas_kernels.attention import Partial
from tests.kernels import TPU_WAYS, XLA, Case, normal


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + erf(x / np.sqrt(2))) / 2


def phi(q: np.ndarray, first: np.ndarray, second: np.ndarray) -> dict[str, Any]:
    """One head after another."""
    b, h, g, t, _ = q.shape
    out = np.zeros((b, h, g, t, second.shape[-1]))
    for i, j in np.ndindex(h, g):
        out[:, i, j] = abs(gelu(gelu(q[:, i, j] @ first[i, j]) @ second[i, j]))
    return {"features": out}


def psi(k: np.ndarray, first: np.ndarray, second: np.ndarray, third: np.ndarray, *scales: np.ndarray) -> dict[str, Any]:
    """One head after another; two scales are s_1 and s_2, one alone is the literal equation 2."""
    b, h, t, _ = k.shape
    out = np.zeros((b, h, t, second.shape[-1]))
    for i in range(h):
        outer = abs(scales[0][i]) * gelu(gelu(k[:, i] @ first[i]) @ second[i])
        mixed = outer @ third[i]
        out[:, i] = abs(mixed if len(scales) == 1 else outer + scales[1][i] * mixed)
    return {"features": out}


def run(function: Callable[..., Any], *arrays: Any, **options: Any) -> dict[str, Any]:
    return {"features": function(*arrays, **options)}


def case_phi(b: int, h: int, g: int, t: int, d: int, r: int, f: int, dtype: str = "float32") -> Case:
    rng = np.random.default_rng(b + h + g + t + d)
    arrays = (
        normal(rng, (b, h, g, t, d), dtype),
        normal(rng, (h, g, d, r), "float32") / np.float32(d) ** 0.5,
        normal(rng, (h, g, r, f), "float32") / np.float32(r) ** 0.5,
    )
    label = "phi-" + "x".join(map(str, (b, h, g, t, d, r, f)))
    return Case("less_memory", label, arrays, partial(run, less_memory.phi), phi, WAYS, dtype)


def case_psi(b: int, h: int, t: int, d: int, r: int, f: int, dtype: str = "float32", scales: int = 2) -> Case:
    rng = np.random.default_rng(b + h + t + d)
    arrays = (
        normal(rng, (b, h, t, d), dtype),
        normal(rng, (h, d, r), "float32") / np.float32(d) ** 0.5,
        normal(rng, (h, r, f), "float32") / np.float32(r) ** 0.5,
        normal(rng, (h, f, f), "float32"),
        *[normal(rng, (h, f), "float32") for _ in range(scales)],
    )
    label = "psi-" + "x".join(map(str, (b, h, t, d, r, f))) + ("" if scales == 2 else "-literal")
    return Case("less_memory", label, arrays, partial(run, less_memory.psi), psi, WAYS, dtype)


def remembered(
    memory: tuple[np.ndarray, np.ndarray],
    evicted: tuple[np.ndarray, np.ndarray, np.ndarray],
    q: np.ndarray,
    attended: Partial,
    of_phi: dict[str, np.ndarray],
    of_psi: dict[str, np.ndarray],
) -> dict[str, Any]:
    """Algorithm 1's step, one head of one row after another."""
    (h, z), (k, v, position) = (x.copy() for x in memory), evicted
    out = np.zeros(np.shape(attended.out))
    names = ("first", "second", "third", "outer_scale", "residual_scale")
    of_keys = psi(k[:, :, None], *(of_psi[name] for name in names if name in of_psi))["features"][:, :, 0]
    of_queries = phi(q[:, :, :, None], **of_phi)["features"][:, :, :, 0]
    for row, head in np.ndindex(k.shape[:2]):
        if position[row, head] >= 0:
            h[row, head] += np.outer(of_keys[row, head], v[row, head])
            z[row, head] += of_keys[row, head]
        for i, features in enumerate(of_queries[row, head]):
            mass = np.exp(attended.lse[row, head, i])
            whole = features @ h[row, head] + mass * attended.out[row, head, i]
            out[row, head, i] = whole / max(features @ z[row, head] + mass, 1e-300)
    return {"h": h, "z": z, "out": out}


def case_remember(
    b: int, h: int, g: int, d: int, r: int, f: int, *, dtype: str = "float32", literal: bool = False
) -> Case:
    """Half of the pairs are remembered; the first row has neither seen nor remembered anything, the second not seen."""
    rng = np.random.default_rng(b + h + g + d)
    single = "float32"

    def weights(*heads: int) -> dict[str, np.ndarray]:
        first, second = (normal(rng, (*heads, m, n), single) / np.float32(m) ** 0.5 for m, n in ((d, r), (r, f)))
        return {"first": first.astype(q.dtype), "second": second.astype(q.dtype)}

    q = normal(rng, (b, h, g, d), dtype)
    pairs = normal(rng, (b, h, d), dtype), normal(rng, (b, h, d), dtype)
    evicted = *pairs, np.where(rng.random((b, h)) < 0.5, 7, -1).astype(np.int32)
    held, total = normal(rng, (b, h, f, d), single), abs(normal(rng, (b, h, f), single))
    out, lse = normal(rng, (b, h, g, d), single), normal(rng, (b, h, g), single)
    for row in range(min(b, 2)):
        out[row], lse[row] = 0, -np.inf
    held[0], total[0], evicted[2][0] = 0, 0, -1
    of_psi = weights(h) | {"third": normal(rng, (h, f, f), single), "outer_scale": normal(rng, (h, f), single)}
    if not literal:
        of_psi["residual_scale"] = normal(rng, (h, f), single)
    arrays = (held, total), evicted, q, Partial(out, lse), weights(h, g), of_psi  # type: ignore[arg-type]
    label = "remember-" + "x".join(map(str, (b, h, g, d, r, f))) + "-literal" * literal
    return Case(
        "less_memory",
        label,
        arrays,
        lambda *arrays, **options: less_memory.remember(*arrays, **options)._asdict(),
        remembered,
        WAYS,
        dtype,
    )


WAYS = (XLA, *TPU_WAYS)

CASES = (
    case_phi(2, 1, 2, 70, 16, 256, 8),
    case_phi(3, 2, 4, 1, 64, 128, 8),
    case_phi(1, 1, 1, 600, 8, 128, 32, dtype="bfloat16"),
    case_psi(2, 2, 33, 64, 128, 8),
    case_psi(1, 1, 1, 16, 256, 5, dtype="bfloat16"),
    case_psi(2, 1, 130, 128, 128, 16, scales=1),
    case_remember(3, 16, 1, 128, 128, 8),
    case_remember(9, 8, 2, 64, 256, 5, dtype="bfloat16"),
    case_remember(1, 8, 3, 32, 128, 8, literal=True),
    case_remember(17, 8, 1, 64, 128, 24),
)
