"""Which implementation of an operation runs: the one asked for, or the fastest that fits the shapes and the backend."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_kernels.gpus import capability
from pallas_kernels.operands import Quantised

IMPLEMENTATIONS = ("auto", "xla", "pallas", "triton", "mosaic")
VARIABLE = "KVJAX_KERNELS"
"""Environment variable that stands in for `implementation="auto"`."""

AUTO = {"tpu": ("pallas", "xla"), "gpu": ("xla",)}
"""What `auto` tries on each backend, in this order, where there are no `WINNERS`. No kernel has been timed on a chip
yet: those for TPU are what its compiler accepts, while those for GPU depend on tile sizes that nobody has tuned, and
have to win a race (`kvjax tune`) or to be asked for."""

LISTED = ("TPU v4", "TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e")
"""Kinds of devices for which the kernels' schedules are known from the compiler: `auto` goes by `AUTO`, untimed."""

WINNERS: dict[str, dict[str, tuple[str, ...]]] = {}
"""What won on kinds of devices, for buckets of tasks: the right implementations, the fastest first. `auto` only looks
them up, while programs are traced; who races (`pallas_kernels.race`) writes them."""

HOPPER = 90
"""Compute capability in tenths of the GPUs whose instructions `mosaic` is made of."""

SIMULATED = "tpu"
"""The form of a Pallas kernel that interpreters run where there is no accelerator."""


LANES, SUBLANES = 128, 8
"""A TPU's registers: the last two dimensions of arrays come in tiles of this size."""


class Unsupported(ValueError):
    """An implementation cannot run on this backend or these arguments; the message names the limit."""


class Task(NamedTuple):
    """What an operation is asked to do, so that others can ask the same of it with other numbers."""

    bucket: str
    """From `bucket`: what verdicts are shared by."""
    run: Callable[..., Any]
    """Takes the arguments by name, and `implementation` and `platform`."""
    arguments: dict[str, Any]
    """Arrays, trees of arrays, settings."""


class Asked(NamedTuple):
    """A task as shapes, and who can do it."""

    task: Task
    candidates: tuple[str, ...]


class Survey(str):
    """An `implementation` that runs as `xla`, and keeps what operations are asked while programs are traced.

    It equals nothing but itself, so that it shares no traced program with those that are going to run.
    """

    asked: dict[str, Asked]
    """By their buckets."""

    def __new__(cls) -> Survey:
        made = super().__new__(cls, "xla")
        made.asked = {}
        return made

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    def note(self, task: Task, candidates: tuple[str, ...]) -> None:
        """Keep a task, unless one of its bucket is there that as many can do."""
        held = self.asked.get(task.bucket)
        if held is None or len(held.candidates) < len(candidates):
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x, task.arguments
            )
            self.asked[task.bucket] = Asked(task._replace(arguments=shapes), candidates)


def choose(
    op: str,
    implementation: str,
    limits: Mapping[str, str | None],
    *,
    platform: str | None = None,
    interpret: Any = False,
    task: Task | None = None,
) -> str:
    """The implementation that is going to run: `xla`, `pallas`, `triton` or `mosaic`.

    Args:
        op: name of the operation, for messages.
        implementation: `auto` (then the environment variable KVJAX_KERNELS, if set, or else who has won on this kind of
            device, see `WINNERS`), `xla`, `pallas`, `triton` or `mosaic`; or several of these names with commas between
            them, for the first that can run; or a `Survey`.
        limits: for all but `xla` what these arguments ask that it cannot do, or None; an implementation that is missing
            here does not exist.
        platform: `cpu`, `gpu` or `tpu`, for which the program is compiled; None for that of `jax.default_backend()`.
        interpret: as given to `pallas_call`; anything but False lets `pallas` and `mosaic` run on every backend.
        task: what is asked; None where nobody can win anything.

    Raises:
        Unsupported: the implementation asked for cannot run.
        ValueError: there is no such implementation.
    """
    platform = platform_of(platform)
    if isinstance(implementation, Survey):
        if task is not None:
            names = IMPLEMENTATIONS[1:]
            implementation.note(task, tuple(x for x in names if _obstacle(x, limits, platform, False) is None))
        return "xla"
    asked = implementation
    if implementation == "auto":
        implementation = os.environ.get(VARIABLE) or "auto"
    names = implementation.split(",")
    if implementation == "auto":
        won = () if task is None or not WINNERS else WINNERS.get(kind_of_device(platform), {}).get(task.bucket, ())
        names = (*won, *AUTO.get(platform, ("xla",)))
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


def or_xla(implementation: str) -> str:
    """The same implementation, but `xla` where that cannot run: of what every model asks for, whatever its shape.

    Args:
        implementation: as `choose` takes it.
    """
    if isinstance(implementation, Survey):
        return implementation
    named = os.environ.get(VARIABLE) if implementation == "auto" else implementation
    return f"{named},xla" if named and named != "auto" else "auto"


def platform_of(platform: str | None) -> str:
    """`cpu`, `gpu` or `tpu`: the one named, that of the devices in `jax.set_mesh`, or the default backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = platform or getattr(device, "platform", None) or jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name


def kind_of_device(platform: str) -> str:
    """The kind of the devices in `jax.set_mesh`, or else of this machine's; empty if they are not of the platform."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device.device_kind
    return jax.local_devices()[0].device_kind if platform_of(jax.default_backend()) == platform else ""


def bucket(op: str, rounded: Mapping[str, int], exact: Mapping[str, Any]) -> str:
    """The name of all tasks that a verdict is for, which people can read.

    Args:
        op: name of the operation.
        rounded: numbers of rows, slots and tokens, which go up to the next power of two.
        exact: head counts, widths, dtypes and settings that change what is computed; True stands by its name alone,
            None and False are left out.
    """
    most = (f"{name}<={1 << max(size - 1, 0).bit_length()}" for name, size in rounded.items())
    said = ((name, value) for name, value in exact.items() if value is not None and value is not False)
    told = (name if value is True else f"{name}={value}" for name, value in said)
    return " ".join((op, *most, *told))


def numbers_of(x: Any) -> str:
    """In what numbers keys or values lie in memory: a dtype, `int8` or `int4`, or the name of what is no array."""
    if isinstance(x, Quantised):
        return f"int{x.bits}"
    return x.dtype.name if hasattr(x, "dtype") else type(x).__name__


def is_array(x: object) -> bool:
    """Whether something is an array of JAX or NumPy, or stands for one in a program."""
    return isinstance(x, jax.Array | np.ndarray)


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


def tpu_params(parallel: int, arbitrary: int = 0, vmem: int | None = None) -> Any:
    """How kernels are compiled for TPU.

    Without checks of each copy's bounds, which take up to two fifths of a grid step: interpreters check them.

    Args:
        parallel: the first dimensions of the grid, which cores may share.
        arbitrary: the last ones, which run in order.
        vmem: bytes of the chip's memory that a kernel may take; None for the compiler's own limit.
    """
    from jax.experimental.pallas import tpu as pltpu

    semantics: Any = ("parallel",) * parallel + ("arbitrary",) * arbitrary
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=vmem, disable_bounds_checks=True)


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
    if name == "triton" and jax.__version_info__ >= (0, 12):
        found = importlib.metadata.version("jax-triton")
        if tuple(map(int, found.split(".")[:3])) <= (0, 4, 1):  # its rules are called with other arguments there
            return f"jax-triton {found} does not work with jax {jax.__version__}"
    if name == "mosaic" and jax.__version_info__ < (0, 10, 2):  # what Mosaic GPU is called with changed there
        return f"it needs jax 0.10.2, and this is {jax.__version__}"
    if name == "mosaic" and interpret is False:
        if platform != "gpu":
            return f"it compiles for gpu, not for {platform} (there only with interpret=True)"
        if (found := _capability()) != HOPPER:
            had = "there is none to ask here" if found is None else f"this one's is {found / 10}"
            return f"it needs a GPU of compute capability {HOPPER / 10} (Hopper), and {had}"
    return limits[name]


def _capability() -> int | None:
    """Compute capability in tenths of the GPU that is compiled for; None where there is none to ask."""
    known = capability()
    if known is None and platform_of(jax.default_backend()) == "gpu":
        major, minor = jax.local_devices()[0].compute_capability.split(".")
        return 10 * int(major) + int(minor)
    return known
