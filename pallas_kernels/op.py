"""Base of the operations: arguments, a reference in XLA, kernels by backend, and the choice between them."""

from __future__ import annotations

import abc
import contextlib
import contextvars
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, ParamSpec, Protocol, Self, TypedDict, TypeVar, overload

import jax

from pallas_kernels.common import IMPLEMENTATIONS, VARIABLE, Survey, Tuned, TuningTask, Unsupported, bucket_name

AUTO = {"tpu": ("pallas", "xla"), "gpu": ("xla",)}
"""Implementations that `auto` tries on each backend, in this order, after the winners of a `Tuned`. The TPU kernels
are accepted by its compiler and have not been timed on a TPU. Whether the GPU kernels are faster depends on sizes, so
they must win a benchmark (`kvjax tune`) or be requested."""

Result = TypeVar("Result")
Answer = TypeVar("Answer", covariant=True)
Arguments = ParamSpec("Arguments")

Limit = tuple[bool, str]
"""True if arguments are within a limit of a kernel, and the text to report if not."""


class How(TypedDict, total=False):
    """Keywords of every operation: how a call runs.

    An operation raises `Unsupported` if the requested implementation cannot run its arguments here, and `ValueError` if
    there is no such implementation. Kernels for TPU compile for v4 to v6e and have run in interpreters, never on a TPU;
    those for GPU have run on an H100 and an H200.
    """

    implementation: str
    """`auto`, `xla`, `pallas` or `triton`, or several; see `choose`."""
    interpret: Any
    """To run `pallas` without an accelerator: True, or the parameters of jax's interpreter for TPU
    (`pltpu.InterpretParams()`)."""
    platform: str | None
    """Target of compilation; None for that of `jax.set_mesh`, else of `jax.default_backend()`."""


class Options(NamedTuple):
    """Implementation, interpreter and platform of a call, with the defaults of `How`."""

    implementation: str
    interpret: Any
    platform: str
    """Target of compilation: `cpu`, `gpu` or `tpu`."""

    @property
    def runs_kernels(self) -> bool:
        """True if kernels can run, on a GPU or TPU or in an interpreter, or if a survey records which ones could."""
        can_run = self.platform in ("gpu", "tpu") or self.interpret is not False
        return can_run or isinstance(self.implementation, Survey)


class Kernels(NamedTuple):
    """Implementation of every operation, and its target: see `How`."""

    implementation: str = "auto"
    interpret: Any = False
    platform: str | None = None


_DEFAULT = Kernels()
_CHOICE = contextvars.ContextVar("kernels", default=_DEFAULT)


@contextlib.contextmanager
def using(kernels: Kernels) -> Generator[None]:
    """Choose how operations run that are traced inside, where a call names nothing else.

    A function that is compiled inside must take `kernels` as a static argument: `jit` knows no other difference.
    """
    token = _CHOICE.set(kernels)
    try:
        yield
    finally:
        _CHOICE.reset(token)


def options_of(**how: Any) -> Options:
    """Return the options of a call, as `How` describes them; those of `using` where it names none."""
    choice = _CHOICE.get()
    implementation, interpret, platform = choice._replace(**how)
    # Found for each call, because `jax.shard_map` sets the mesh of what it traces.
    return Options(implementation, interpret, platform_of(platform or choice.platform))


@dataclasses.dataclass(frozen=True, eq=False)
class Op(abc.ABC, Generic[Result]):
    """One call of an operation, bound to its arguments.

    A subclass is a dataclass whose fields are the operation's arguments. It names its kernels (`backends`) and their
    limits, and says which calls share a benchmark (`workload`). The modules beside it have a function of the
    operation's name, which takes the call: `reference` defines the result, and the kernels' modules must return the
    same. A subclass is registered as a pytree, so kernels get references to blocks of the arguments in the same record.
    """

    name: ClassVar[str]
    backends: ClassVar[tuple[str, ...]]
    """Kernels, each a module beside the subclass's: `pallas_tpu`, `pallas_gpu`, `triton`."""
    in_place: ClassVar[Mapping[str, Callable[[Any], Any]]] = MappingProxyType({})
    """Arguments whose memory the result reuses if the caller donates them, and functions that find them in it."""

    def reference(self, options: Options) -> Result:
        """Run in XLA, which takes all arguments on all platforms."""
        return getattr(self.module("reference"), self.name)(self, options)

    def kernel(self, backend: str, options: Options) -> Result:
        """Run a backend's kernel, for arguments within its limits."""
        return getattr(self.module(backend), self.name)(self, interpret=options.interpret)

    def validate(self) -> Self:
        """Return the call as kernels take it; raise a ValueError if arguments do not fit each other."""
        return self

    @abc.abstractmethod
    def limits(self, backend: str) -> Iterator[Limit]:
        """Yield the limits of a backend's kernel; evaluation stops at the first that is exceeded."""

    @abc.abstractmethod
    def workload(self) -> tuple[Mapping[str, int], Mapping[str, Any]] | None:
        """Return the sizes and settings that name a benchmark, as `bucket_name` takes them; None if there is none."""

    def __call__(self, implementation: str | None = None, **target: Any) -> Result:
        """Run the implementation that `choose` returns, with the arguments of `How`."""
        options = options_of(**target if implementation is None else target | {"implementation": implementation})
        return self.run(self.choose(options), options)

    def choose(self, options: Options) -> str:
        """Return the implementation to run: `xla`, `pallas` or `triton`; see the function `choose`."""
        implementation, interpret, platform = options
        limits, task = _Limits(self, platform), None
        if isinstance(implementation, Survey | Tuned) and (workload := self.workload()) is not None:
            task = TuningTask(bucket_name(self.name, *workload), self)
        return choose(self.name, implementation, limits, platform=platform, interpret=interpret, task=task)

    def run(self, implementation: str, options: Options) -> Result:
        """Run the implementation that was chosen."""
        if implementation == "xla":
            return self.reference(options)
        return self.kernel(backend_of(implementation, options.platform), options)

    def unsupported(self, implementation: str, platform: str) -> str | None:
        """Return what these arguments need that an implementation's kernel for a platform cannot do, or None."""
        backend = backend_of(implementation, platform)
        if backend not in self.backends:
            return f"it is written for {', '.join(name.partition('_')[2] for name in self.backends)} alone"
        return next((text for within, text in self.limits(backend) if not within), None)

    def module(self, name: str) -> Any:
        """Import a module beside the subclass's when it runs: Pallas imports slowly, and jax-triton may be missing."""
        return importlib.import_module(f"{type(self).__module__.rpartition('.')[0]}.{name}")


class _Limits(Mapping[str, str | None]):
    """Limits that a call exceeds, by the implementations that the operation has; computed when they are looked up."""

    def __init__(self, call: Op[Any], platform: str) -> None:
        self._call, self._platform = call, platform
        self._names = [name for name in IMPLEMENTATIONS if any(kernel.startswith(name) for kernel in call.backends)]

    def __getitem__(self, implementation: str) -> str | None:
        if implementation not in self._names:
            raise KeyError(implementation)
        return self._call.unsupported(implementation, self._platform)

    def __contains__(self, implementation: object) -> bool:
        return implementation in self._names  # Mapping's own would compute the limit

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def choose(
    op: str,
    implementation: str,
    limits: Mapping[str, str | None],
    *,
    platform: str | None = None,
    interpret: Any = False,
    task: TuningTask | None = None,
) -> str:
    """Return the implementation to run: `xla`, `pallas` or `triton`.

    Args:
        implementation: `auto`, `xla`, `pallas` or `triton`; several names except `auto`, separated by commas,
            for the first that can run; a `Survey`, or a `Tuned`. `auto` reads the environment variable KVJAX_KERNELS.
            If that is not set, it tries the winners of a `Tuned` on its kind of device, then `AUTO`.
        limits: for each existing implementation except `xla`, the limit that these arguments exceed, or None.
        platform: `cpu`, `gpu` or `tpu`, the target of compilation; None as in `platform_of`.
        interpret: as for `pallas_call`; any value but False lets `pallas` run on every backend.
        task: the call, for the lookup of tuning results; None if no benchmark covers it.

    Raises:
        Unsupported: the requested implementation cannot run.
        ValueError: the implementation is unknown.
    """
    platform = platform_of(platform)
    if isinstance(implementation, Survey):
        if task is not None:
            reasons = {name: _unsupported_reason(name, limits, platform, False) for name in IMPLEMENTATIONS[1:]}
            implementation.note(task, tuple(name for name, reason in reasons.items() if reason is None))
        return "xla"
    argument = implementation
    if isinstance(argument, Tuned) or implementation == "auto":
        implementation = os.environ.get(VARIABLE) or "auto"
    names = implementation.split(",")
    if implementation == "auto":
        names = AUTO.get(platform, ("xla",))
        if isinstance(argument, Tuned) and task is not None and argument.device == kind_of_device(platform):
            names = (*argument.orders.get(task.bucket, ()), *names)
    elif "auto" in names or not set(names) <= set(IMPLEMENTATIONS):
        where = f"implementation={implementation!r}" if argument == implementation else f"{VARIABLE}={implementation}"
        raise ValueError(f"{where} is not one of {', '.join(IMPLEMENTATIONS)}.")
    reasons = {}
    for name in names:
        reasons[name] = _unsupported_reason(name, limits, platform, interpret)
        if reasons[name] is None:
            return name
    text = "; nor as ".join(f"{name!r}: {reason}" for name, reason in reasons.items())
    raise Unsupported(f"{op} cannot run as {text}; use 'xla' or 'auto'.")


def or_xla(implementation: str) -> str:
    """Return the same implementation with `xla` as fallback, for operations that models of any shape need."""
    if isinstance(implementation, Survey):
        return implementation
    automatic = isinstance(implementation, Tuned) or implementation == "auto"
    name = os.environ.get(VARIABLE) if automatic else implementation
    return f"{name},xla" if name and name != "auto" else implementation


def platform_of(platform: str | None) -> str:
    """Return `cpu`, `gpu` or `tpu`: the one named, that of the devices in `jax.set_mesh`, or the default backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = platform or getattr(device, "platform", None) or jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name


def kind_of_device(platform: str) -> str:
    """Return the device kind in `jax.set_mesh`, or this machine's; empty if that is not of the platform."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device.device_kind
    return jax.local_devices()[0].device_kind if platform_of(jax.default_backend()) == platform else ""


def _unsupported_reason(name: str, limits: Mapping[str, str | None], platform: str, interpret: Any) -> str | None:
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
        installed = importlib.metadata.version("jax-triton")
        if tuple(map(int, installed.split(".")[:3])) <= (0, 4, 1):  # jax 0.12 calls its rules with other arguments
            return f"jax-triton {installed} does not work with jax {jax.__version__}"
    return limits[name]


def backend_of(implementation: str, platform: str) -> str:
    """Return the backend of an implementation's kernel: the name of its file; interpreters run the one for TPU."""
    if implementation != "pallas":
        return implementation
    return "pallas_gpu" if platform == "gpu" else "pallas_tpu"


class Operation(Protocol[Arguments, Answer]):
    """Function of an operation's arguments, and of the keywords of `How`."""

    @overload
    def __call__(self, *arguments: Arguments.args, **keywords: Arguments.kwargs) -> Answer: ...
    @overload
    def __call__(self, *arguments: Any, implementation: str, **keywords: Any) -> Answer: ...


def operation(kind: Callable[Arguments, Op[Answer]]) -> Operation[Arguments, Answer]:
    """Return the function that makes calls of an operation and runs them; the class has its docstring."""

    @functools.wraps(kind, updated=())
    def run(*arguments: Any, **keywords: Any) -> Any:
        how = {name: keywords.pop(name) for name in How.__annotations__.keys() & keywords.keys()}
        return kind(*arguments, **keywords).validate()(**how)

    arguments = inspect.signature(kind).parameters.values()
    keywords = inspect.Parameter("how", inspect.Parameter.VAR_KEYWORD)
    run.__signature__ = inspect.Signature([*arguments, keywords])  # type: ignore[attr-defined]  # as jit reads it
    return run
