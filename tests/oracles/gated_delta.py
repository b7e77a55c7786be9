"""The gated delta rule in NumPy, one token and one head after another (Yang et al. 2025, equation 10)."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float


def gated_delta(
    q: Float[np.ndarray, "b h t d"],
    k: Float[np.ndarray, "b h t d"],
    v: Float[np.ndarray, "b h r t e"],
    beta: Float[np.ndarray, "b h r t"],
    decay: Float[np.ndarray, "b h r t"],
    state: Float[np.ndarray, "b h r d e"],
) -> tuple[Float[np.ndarray, "b h r t e"], Float[np.ndarray, "b h r d e"]]:
    """Return what each token reads, and the last states; S is [e, d], as in the paper."""
    out, last = np.zeros(v.shape), np.zeros(state.shape)
    for b, h, r in np.ndindex(beta.shape[:3]):
        s, eye = state[b, h, r].T, np.eye(k.shape[-1])
        for t in range(k.shape[2]):
            key, write = k[b, h, t], beta[b, h, r, t]
            s = math.exp(decay[b, h, r, t]) * s @ (eye - write * np.outer(key, key)) + write * np.outer(
                v[b, h, r, t], key
            )
            out[b, h, r, t] = s @ q[b, h, t]
        last[b, h, r] = s.T
    return out, last
