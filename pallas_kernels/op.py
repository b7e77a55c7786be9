"""Base of the operations: arguments, a reference in XLA, kernels by backend, and the choice between them."""

from __future__ import annotations

import abc
import contextlib
import contextvars
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Generator, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, ParamSpec, Protocol, Self, TypedDict, TypeVar, overload

from pallas_kernels.common import IMPLEMENTATIONS, Survey, Tuned, TuningTask, bucket_name, choose, platform_of

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
    """`auto`, `xla`, `pallas` or `triton`, or several; see `pallas_kernels.common.choose`."""
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


class Kernels(NamedTuple):
    """Implementation of every operation, and its target: see `How`."""

    implementation: str = "auto"
    interpret: Any = False
    platform: str | None = None


_CHOICE: contextvars.ContextVar[Options | None] = contextvars.ContextVar("kernels", default=None)


@contextlib.contextmanager
def using(kernels: Kernels) -> Generator[None]:
    """Choose how operations run that are traced inside, where a call names nothing else.

    A function that is compiled inside must take `kernels` as a static argument: `jit` knows no other difference.
    """
    token = _CHOICE.set(options_of(**kernels._asdict()))
    try:
        yield
    finally:
        _CHOICE.reset(token)


def options_of(**how: Any) -> Options:
    """Return the options of a call, as `How` describes them; those of `using` where it names none."""
    choice = _CHOICE.get()
    if choice is not None and how.get("platform") is None:
        return choice._replace(**{name: value for name, value in how.items() if name != "platform"})
    implementation, interpret, platform = (choice or Kernels())._replace(**how)
    return Options(implementation, interpret, platform_of(platform))


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
        """Return the implementation to run: `xla`, `pallas` or `triton`; see `common.choose`."""
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
