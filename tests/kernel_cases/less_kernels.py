"""Phi and psi of LESS: cases, and both in float64 NumPy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from scipy.special import erf

from pallas_kernels import less_kernels
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
    return Case("less_kernels", label, arrays, partial(run, less_kernels.phi), phi, WAYS, dtype)


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
    return Case("less_kernels", label, arrays, partial(run, less_kernels.psi), psi, WAYS, dtype)


WAYS = (XLA, *TPU_WAYS)

CASES = (
    case_phi(2, 1, 2, 70, 16, 256, 8),
    case_phi(3, 2, 4, 1, 64, 128, 8),
    case_phi(1, 1, 1, 600, 8, 128, 32, dtype="bfloat16"),
    case_psi(2, 2, 33, 64, 128, 8),
    case_psi(1, 1, 1, 16, 256, 5, dtype="bfloat16"),
    case_psi(2, 1, 130, 128, 128, 16, scales=1),
)
