"""Names of implementations, tuning results, and the layout of arrays on a TPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from pallas_kernels.operands import Encoded, Quantised

IMPLEMENTATIONS = ("auto", "xla", "pallas", "triton")
VARIABLE = "KVJAX_KERNELS"
"""Environment variable that replaces `implementation="auto"`."""

LISTED = ("TPU v4", "TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e")
"""Device kinds whose kernel schedules are known from the compiler: `auto` uses `AUTO` there without timing."""

CAPABILITIES = {"NVIDIA A100-SXM4-80GB": 80, "NVIDIA H100 80GB HBM3": 90}
"""Compute capability, in tenths, of device kinds that programs are compiled for without the device."""


LANES, SUBLANES = 128, 8
"""Size of a TPU register: the last two dimensions of arrays are tiled by it."""

VMEM_BYTES = 14 << 20
"""VMEM that a TPU kernel may take on every chip."""


class Unsupported(ValueError):
    """Error of an implementation that cannot run here or with these arguments; the message names the limit."""


class TuningTask(NamedTuple):
    """One call of an operation, which a benchmark can repeat with other inputs."""

    bucket: str
    """Name from `bucket_name`; tasks of one bucket share a result."""
    call: Any
    """The call, a `pallas_kernels.op.Op`; recorded tasks have shapes for arrays."""
    candidates: tuple[str, ...] = ()
    """Implementations that can run it, of a recorded task."""


class _Unique(str):
    # An `implementation` that equals only itself, so that it shares no traced program with others.
    def __eq__(self, value: object) -> bool:
        return self is value

    def __ne__(self, value: object) -> bool:
        return self is not value

    def __hash__(self) -> int:
        return id(self)


class Tuned(_Unique):
    """An `implementation` that stands for `auto` with benchmark winners; it shares no traced program with others.

    Args:
        device: kind of device that the benchmarks ran on.
        orders: winners by task bucket: the correct implementations, fastest first. They are looked up while programs
            are traced, so later additions count for later programs.
    """

    device: str
    orders: dict[str, tuple[str, ...]]

    def __new__(cls, device: str, orders: Mapping[str, tuple[str, ...]]) -> Self:
        instance = super().__new__(cls, "auto")
        instance.device, instance.orders = device, dict(orders)
        return instance


class Survey(_Unique):
    """An `implementation` that runs as `xla` and records each operation's tasks while programs are traced.

    It shares no traced program with real runs.
    """

    requests: dict[str, TuningTask]
    """Recorded tasks by bucket."""

    def __new__(cls) -> Survey:
        instance = super().__new__(cls, "xla")
        instance.requests = {}
        return instance

    def note(self, task: TuningTask, candidates: tuple[str, ...]) -> None:
        """Record a task, unless its bucket has one with at least as many candidates."""
        request = self.requests.get(task.bucket)
        if request is None or len(request.candidates) < len(candidates):

            def shape(x: Any) -> Any:
                return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array | np.ndarray) else x

            self.requests[task.bucket] = TuningTask(task.bucket, jax.tree.map(shape, task.call), candidates)


def bucket_name(op: str, rounded: Mapping[str, int], exact: Mapping[str, Any]) -> str:
    """Return the readable name of all tasks that share a tuning result.

    Numbers of rows, slots and tokens (`rounded`) are rounded up to the next power of two. Of the settings that change
    the computation (`exact`), True is written as its name alone, None and False are left out.
    """
    rounded_sizes = (f"{name}<={1 << max(size - 1, 0).bit_length()}" for name, size in rounded.items())
    settings = ((name, value) for name, value in exact.items() if value is not None and value is not False)
    words = (name if value is True else f"{name}={value}" for name, value in settings)
    return " ".join((op, *rounded_sizes, *words))


def numbers_of(x: Any) -> str:
    """Return the storage format of keys or values: a dtype, `int8`, `int4`, or the name of a decoder or type."""
    if isinstance(x, Quantised):
        return f"int{x.bits}"
    if isinstance(x, Encoded):
        return type(x.decoder).__name__
    return x.dtype.name if hasattr(x, "dtype") else type(x).__name__


def padded(size: int, unit: int) -> int:
    """Return the size rounded up to a multiple of a unit."""
    return -(-size // unit) * unit


def slots_lie_along_lanes(c: int, d: int) -> bool:
    """Return whether XLA stores [b, h, c, d] on a TPU with c innermost: it takes the order with less padding.

    If a kernel reads such an array with d innermost, XLA copies all of it before every call.
    """
    return padded(d, SUBLANES) * padded(c, LANES) < padded(c, SUBLANES) * padded(d, LANES)


def tpu_params(parallel: int, arbitrary: int = 0, vmem: int | None = None) -> Any:
    """Return the compiler parameters of TPU kernels, which may take `vmem` bytes or the compiler's own limit.

    Cores may share the first `parallel` dimensions of the grid; the last `arbitrary` run in order. Bounds checks of
    copies are off: they take up to two fifths of a grid step. Interpreters check the bounds.
    """
    from jax.experimental.pallas import tpu as pltpu

    semantics: Any = ("parallel",) * parallel + ("arbitrary",) * arbitrary
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=vmem, disable_bounds_checks=True)


def chip() -> Any:
    """Return what jax knows of the target TPU, a `TpuInfo`; None if there is no TPU, or one unknown to jax."""
    from jax.experimental.pallas import tpu as pltpu

    try:
        return pltpu.get_tpu_info()
    except ValueError:
        return None


def over_cores(units: int) -> tuple[int, int]:
    """Return the first axes of a grid over `units` units: cores of a chip, two at most, and the units of each."""
    cores = 2 if units % 2 == 0 else 1
    return cores, units // cores


def row_and_block(core: Any, step: Any, units: int, blocks: int) -> tuple[Any, Any]:
    """Return the row, and its block of heads, of a step on a core that has `units` units."""
    unit = core * units + step
    return jax.lax.div(unit, blocks), jax.lax.rem(unit, blocks)


def capability() -> int | None:
    """Return the compute capability of the GPU in `jax.set_mesh` if it is in `CAPABILITIES`, else None."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return CAPABILITIES.get(getattr(device, "device_kind", ""))
