"""Which implementation of an operation runs: the one asked for, or the fastest that fits the shapes and the backend."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import jax

IMPLEMENTATIONS = ("auto", "xla", "pallas", "triton")
VARIABLE = "KVJAX_KERNELS"
"""Environment variable that stands in for `implementation="auto"`."""

AUTO = {"tpu": ("pallas", "xla"), "gpu": ("xla",)}
"""What `auto` tries on each backend, in this order. No kernel has been timed on a chip yet: those for TPU are what its
compiler accepts, while those for GPU depend on tile sizes that nobody has tuned, and have to be asked for."""

SIMULATED = "tpu"
"""The form of a Pallas kernel that interpreters run where there is no accelerator."""


LANES, SUBLANES = 128, 8
"""A TPU's registers: the last two dimensions of arrays come in tiles of this size."""


class Unsupported(ValueError):
    """An implementation cannot run on this backend or these arguments; the message names the limit."""


def choose(
    op: str,
    implementation: str,
    limits: Mapping[str, str | None],
    *,
    platform: str | None = None,
    interpret: Any = False,
) -> str:
    """The implementation that is going to run: `xla`, `pallas` or `triton`.

    Args:
        op: name of the operation, for messages.
        implementation: `auto` (then the environment variable KVJAX_KERNELS, if set), `xla`, `pallas` or `triton`; or
            several of these names with commas between them, for the first that can run.
        limits: for `pallas` and `triton` what these arguments ask that it cannot do, or None; an implementation that
            is missing here does not exist.
        platform: `cpu`, `gpu` or `tpu`, for which the program is compiled; None for that of `jax.default_backend()`.
        interpret: as given to `pallas_call`; anything but False lets `pallas` run on every backend.

    Raises:
        Unsupported: the implementation asked for cannot run.
        ValueError: there is no such implementation.
    """
    platform = platform_of(platform)
    asked = implementation
    if implementation == "auto":
        implementation = os.environ.get(VARIABLE) or "auto"
    names = implementation.split(",")
    if implementation == "auto":
        names = AUTO.get(platform, ("xla",))
    elif "auto" in names or not set(names) <= set(IMPLEMENTATIONS):
        where = f"implementation={implementation!r}" if asked == implementation else f"{VARIABLE}={implementation}"
        raise ValueError(f"{where} is not one of {', '.join(IMPLEMENTATIONS)}.")
    obstacles = {}
    for name in names:
        obstacles[name] = _obstacle(name, limits, platform, interpret)
        if obstacles[name] is None:
            return name
    reasons = "; nor as ".join(f"{name!r}: {obstacle}" for name, obstacle in obstacles.items())
    raise Unsupported(f"{op} cannot run as {reasons}; use 'xla' or 'auto'.")


def platform_of(platform: str | None) -> str:
    """`cpu`, `gpu` or `tpu`: the one named, that of the devices in `jax.set_mesh`, or the default backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = platform or getattr(device, "platform", None) or jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name


def pallas_form(platform: str | None) -> str:
    """Which form of a Pallas kernel is meant, `gpu` or `tpu`."""
    platform = platform_of(platform)
    return platform if platform in ("gpu", "tpu") else SIMULATED


def first_limit(*limits: tuple[bool, str]) -> str | None:
    """The text of the first limit that is exceeded, given (within, text)."""
    return next((text for within, text in limits if not within), None)


def padded(size: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-size // unit) * unit


def slots_lie_along_lanes(c: int, d: int) -> bool:
    """Whether XLA stores [b, h, c, d] on a TPU with c innermost: it takes the order that needs less padding.

    A kernel that reads such an array as it is written would have all of it copied before every call.
    """
    return padded(d, SUBLANES) * padded(c, LANES) < padded(c, SUBLANES) * padded(d, LANES)


def over_cores(units: int) -> tuple[int, int]:
    """The first axes of a grid of so many units: cores of a chip, two at most, and the units of each."""
    cores = 2 if units % 2 == 0 else 1
    return cores, units // cores


def row_and_block(core: Any, step: Any, units: int, blocks: int) -> tuple[Any, Any]:
    """Which row, and which of its blocks of heads, a core with so many units is at."""
    unit = core * units + step
    return jax.lax.div(unit, blocks), jax.lax.rem(unit, blocks)


def _obstacle(name: str, limits: Mapping[str, str | None], platform: str, interpret: Any) -> str | None:
    if name == "xla":
        return None
    if name not in limits:
        return "there is no such kernel for this operation"
    if name == "pallas" and platform not in ("gpu", "tpu") and interpret is False:
        return f"it compiles for tpu and gpu, not for {platform} (there only with interpret=True)"
    if name == "triton" and platform != "gpu":
        return f"it compiles for gpu, not for {platform}"
    if name == "triton" and importlib.util.find_spec("jax_triton") is None:
        return "it needs jax-triton, which pip install 'kvjax[gpu]' brings"
    return limits[name]
