"""Base of the operations: arguments, a reference in XLA, kernels by backend, and the choice between them."""

from __future__ import annotations

import abc
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, TypedDict, TypeVar

from pallas_kernels.common import IMPLEMENTATIONS, Task, bucket, choose, platform_of

Result = TypeVar("Result")

Limit = tuple[bool, str]
"""True if arguments are within a limit of a kernel, and the text to report if not."""


class How(TypedDict, total=False):
    """Keywords of every operation: how a call runs.

    An operation raises `Unsupported` if the requested implementation cannot run its arguments here, and `ValueError` if
    there is no such implementation. Kernels for TPU compile for v4 to v6e and have run in interpreters, never on a TPU;
    those for GPU have run on an H100 and an H200.
    """

    implementation: str
    """`auto`, `xla`, `pallas`, `triton` or `mosaic`, or several; see `pallas_kernels.common.choose`."""
    interpret: Any
    """To run `pallas` or `mosaic` without an accelerator: True, or the parameters of jax's interpreter for TPU
    (`pltpu.InterpretParams()`) or Mosaic GPU."""
    platform: str | None
    """Target of compilation; None for that of `jax.set_mesh`, else of `jax.default_backend()`."""


class Options(NamedTuple):
    """Implementation, interpreter and platform of a call, with the defaults of `How`."""

    implementation: str
    interpret: Any
    platform: str
    """Target of compilation: `cpu`, `gpu` or `tpu`."""


def options_of(implementation: str = "auto", interpret: Any = False, platform: str | None = None) -> Options:
    """Return the options of a call, as `How` describes them."""
    return Options(implementation, interpret, platform_of(platform))


@dataclasses.dataclass(frozen=True, eq=False)
class Op(abc.ABC, Generic[Result]):
    """One call of an operation, bound to its arguments.

    A subclass is a dataclass whose fields are the operation's arguments. It defines the result (`reference`), names its
    kernels (`backends`) and their limits, and says which calls share a benchmark (`workload`). The choice between
    reference and kernels is here.
    """

    name: ClassVar[str]
    backends: ClassVar[tuple[str, ...]]
    """Kernels, each a module beside the subclass's: `pallas_tpu`, `pallas_gpu`, `triton`, `mosaic_gpu`."""
    in_place: ClassVar[Mapping[str, Callable[[Any], Any]]] = MappingProxyType({})
    """Arguments whose memory the result reuses if the caller donates them, and functions that find them in it."""

    @abc.abstractmethod
    def reference(self, options: Options) -> Result:
        """Run in XLA, which takes all arguments on all platforms."""

    @abc.abstractmethod
    def kernel(self, backend: str, options: Options) -> Result:
        """Run a backend's kernel, for arguments within its limits."""

    @abc.abstractmethod
    def limits(self, backend: str) -> Iterator[Limit]:
        """Yield the limits of a backend's kernel; evaluation stops at the first that is exceeded."""

    @abc.abstractmethod
    def workload(self) -> tuple[Mapping[str, int], Mapping[str, Any]] | None:
        """Return the sizes and settings that name a benchmark, as `bucket` takes them; None if there is none."""

    def __call__(self, implementation: str = "auto", interpret: Any = False, platform: str | None = None) -> Result:
        """Run the implementation that `choose` returns."""
        options = options_of(implementation, interpret, platform)
        return self.run(self.choose(options), options)

    def choose(self, options: Options) -> str:
        """Return the implementation to run: `xla`, `pallas`, `triton` or `mosaic`; see `common.choose`."""
        limits = {name: self.unsupported(name, options.platform) for name in self.implementations()}
        workload = self.workload()
        task = None if workload is None else self._task(bucket(self.name, *workload))
        implementation, interpret, platform = options
        return choose(self.name, implementation, limits, platform=platform, interpret=interpret, task=task)

    def run(self, implementation: str, options: Options) -> Result:
        """Run the implementation that was chosen."""
        if implementation == "xla":
            return self.reference(options)
        return self.kernel(backend_of(implementation, options.platform), options)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def implementations(self) -> tuple[str, ...]:
        """Return the implementations that have a kernel for some platform."""
        return tuple(name for name in IMPLEMENTATIONS if any(kernel.startswith(name) for kernel in self.backends))

    def unsupported(self, implementation: str, platform: str) -> str | None:
        """Return what these arguments need that an implementation's kernel for a platform cannot do, or None."""
        backend = backend_of(implementation, platform)
        if backend not in self.backends:
            return f"it is written for {', '.join(name.partition('_')[2] for name in self.backends)} alone"
        return next((text for within, text in self.limits(backend) if not within), None)

    def module(self, backend: str) -> Any:
        """Import a kernel's module, when it runs: Pallas imports slowly, and jax-triton may be missing."""
        return importlib.import_module(f"{type(self).__module__.rpartition('.')[0]}.{backend}")

    @classmethod
    def repeat(cls, implementation: str, platform: str | None = None, **arguments: Any) -> Result:
        """Run the operation with other arguments, as benchmarks do."""
        return cls(**arguments)(implementation=implementation, platform=platform)

    def _task(self, name: str) -> Task:
        return Task(name, self.repeat, self.arguments(), self.in_place)


def backend_of(implementation: str, platform: str) -> str:
    """Return the backend of an implementation's kernel: the name of its file; interpreters run the one for TPU."""
    pallas = "pallas_gpu" if platform == "gpu" else "pallas_tpu"
    return {"pallas": pallas, "mosaic": "mosaic_gpu"}.get(implementation, implementation)
