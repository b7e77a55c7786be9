"""RoPE of one token: cases, and the turns of a plane, pair by pair."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.operands import whole_widths
from pallas_kernels.rope import rope
from tests.kernels import TPU_WAYS, XLA, Case, normal


def run(turned: Any, angles: Any, still: Any, *, interleaved: bool, **options: Any) -> dict[str, Any]:
    cos, sin = whole_widths(jnp.cos(angles), jnp.sin(angles), interleaved)
    return {f"of {i}": x for i, x in enumerate(rope(turned, cos, sin, still, interleaved=interleaved, **options))}


def oracle(turned: Any, angles: np.ndarray, still: Any, *, interleaved: bool) -> dict[str, Any]:
    """Each pair as a number of the plane, multiplied with one of length one."""
    found = [x.copy() for x in (*turned, *still)]
    half = angles.shape[1]
    for x in found[: len(turned)]:
        for row, i in np.ndindex(angles.shape):
            pair = [2 * i, 2 * i + 1] if interleaved else [i, i + half]
            after = (x[row][:, pair] @ [1, 1j]) * np.exp(1j * angles[row, i])
            x[row][:, pair] = np.stack([after.real, after.imag], axis=-1)
    return {f"of {i}": x for i, x in enumerate(found)}


def case(
    b: int,
    turned: tuple[int, ...],
    still: tuple[int, ...],
    d: int,
    *,
    dtype: str = "float32",
    width: int | None = None,
    interleaved: bool = False,
) -> Case:
    """So many heads that are turned, and that are not; those that halves of 128 channels make the kernel takes, too."""
    rng = np.random.default_rng(b + d)
    width = d if width is None else width
    heads, others = (tuple(normal(rng, (b, n, d), dtype) for n in numbers) for numbers in (turned, still))
    angles = rng.uniform(-np.pi, np.pi, (b, width // 2)).astype(np.float32)
    label = f"{b}x{turned}+{still}x{d}" + (f"-{width}" if width < d else "") + "-interleaved" * interleaved
    ways = (XLA, *TPU_WAYS) if width == d == 128 and not interleaved else (XLA,)
    either = dict(interleaved=interleaved)
    return Case("rope", label, (heads, angles, others), partial(run, **either), partial(oracle, **either), ways, dtype)


CASES = (
    case(8, (16, 8), (8,), 128),
    case(32, (32, 8), (8,), 128, dtype="bfloat16"),
    case(64, (8,), (), 128, dtype="bfloat16"),
    case(24, (), (8,), 128),
    case(3, (6, 2), (2,), 64),
    case(3, (4, 2), (2,), 80, width=32),
    case(2, (4, 2), (2,), 64, interleaved=True, dtype="bfloat16"),
)
