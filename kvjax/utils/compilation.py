"""Compiled programs: the cache directory that keeps them across processes, and the time spent on compiling them."""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import math
import os
import re
import sys
import tempfile
import threading
import time
import tomllib
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

import jax
from jax import monitoring

_MAKING = "/jax/core/compile/"
_MADE = "/jax/core/compile/backend_compile_duration"
_READ = "/jax/compilation_cache/cache_hits"
_LONG = 0.1
"""Seconds of compiling or reading a program after which memory is returned to the system."""
_PROGRAM = 1_000_000
"""Bytes of a large program on disk."""
_UNWRITABLE = "compiled programs cannot be kept in {}"
_REMEDY = "set KVJAX_CACHE_DIR to a directory with room that you may write to, or to nothing."
_MANY_MAPPINGS = 40_000
"""Memory mappings above which programs are dropped; XLA ends a process that exceeds Linux's limit, 65530."""


def enable_compilation_cache(directory: str | Path | None = None) -> None:
    """Keep compiled programs on disk for later processes; call this before anything else.

    Args:
        directory: directory of the programs. None for that of the environment variable `KVJAX_CACHE_DIR`, or else
            `kvjax/xla` in the user's cache directory (`XDG_CACHE_HOME`, `~/.cache`). If the variable is set and empty,
            nothing is kept.
    """
    chosen = cache_directory() if directory is None else Path(directory)
    if chosen is None:
        return
    # Keep small programs, too: a start needs dozens, and reading one takes a tenth of the time of compiling it.
    min_seconds = 0.0
    try:
        _check_room(chosen)
    except OSError as error:
        warnings.warn(f"{_UNWRITABLE.format(chosen)} ({error.strerror}); {_REMEDY}", stacklevel=2)
        if not chosen.is_dir():
            return
        min_seconds = math.inf  # programs are read, and none is written
    jax.config.update("jax_compilation_cache_dir", str(chosen))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", min_seconds)


def _check_room(directory: Path) -> None:
    """Raise an OSError if no program could be written to a directory, which is made if it is missing."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(bytes(_PROGRAM))


def one_line_warnings() -> Callable[..., str]:
    """Return a `warnings.formatwarning` of one line; JAX's warnings of programs that it cannot keep become one."""
    reported = set[str]()

    def line(message: Warning | str, *_: object, **__: object) -> str:
        failure = re.match(r"Error writing persistent compilation cache .*?': (.*)", str(message), flags=re.DOTALL)
        if failure is None:
            return f"kvjax: {message}\n"
        directory = str(jax.config.values["jax_compilation_cache_dir"])
        if directory in reported:
            return ""
        reported.add(directory)
        return f"kvjax: {_UNWRITABLE.format(directory)} ({' '.join(failure[1].split())}); {_REMEDY}\n"

    return line


def cache_directory() -> Path | None:
    """Return `KVJAX_CACHE_DIR`, or else `kvjax/xla` in the user's cache directory; None if the variable is empty."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    chosen = os.environ.get("KVJAX_CACHE_DIR", str(Path(base) / "kvjax" / "xla"))
    return Path(chosen) if chosen else None


def version() -> str:
    """Return the installed version of kvjax, or that of the checkout."""
    try:
        return importlib.metadata.version("kvjax")
    except importlib.metadata.PackageNotFoundError:
        project = Path(__file__).resolve().parents[2] / "pyproject.toml"
        return tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]


def drop_programs() -> None:
    """Drop all compiled programs if the process holds more than `_MANY_MAPPINGS` memory mappings.

    Each program takes some. Call this in long runs with many programs, such as grids of measurements.
    """
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MANY_MAPPINGS:
        jax.clear_caches()
        gc.collect()


def return_memory() -> None:
    """Return freed memory to the system; glibc keeps what a compiler frees, which can be more than a model takes."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def temporary_bytes(programs: Iterable[jax.stages.Lowered]) -> int | None:
    """Return the largest temporary memory of any of the programs in bytes; None if the compiler reports none.

    Arguments and results are not counted. A program already called with arguments of the same shapes is not compiled
    again.
    """
    analyses = [program.compile().memory_analysis() for program in programs]
    return max((memory.temp_size_in_bytes for memory in analyses if memory is not None), default=None)


class Compiling:
    """Timer of the work on programs in a `with` block: tracing, lowering, and compiling or reading from a cache.

    It also returns the memory that large programs needed while they were made.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        self.programs = 0
        """Programs compiled or read so far, by any thread."""
        self.read = 0
        """Those of them that came from the cache directory."""
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        """Seconds of work on programs so far."""
        return sum(end - start for start, end in self._spans)

    def lap(self) -> float:
        """Return the seconds since the last lap, or since the block began, not counting work on programs."""
        before, self._lap = self._lap, (time.perf_counter(), self.seconds)
        return self._lap[0] - before[0] - (self._lap[1] - before[1])

    def __enter__(self) -> Self:
        self._lap = time.perf_counter(), 0.0
        monitoring.register_event_time_span_listener(self._note)
        monitoring.register_event_listener(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        monitoring.unregister_event_time_span_listener(self._note)
        monitoring.unregister_event_listener(self._count)

    def _count(self, event: str, **_: str | int) -> None:
        with self._lock:
            self.read += event == _READ

    def _note(self, event: str, start_time: float, end_time: float, **_: str | int) -> None:
        if not event.startswith(_MAKING):
            return
        if event == _MADE and end_time - start_time > _LONG:
            return_memory()
        with self._lock:
            self.programs += event == _MADE
            # JAX reports a function traced inside another one first; its time is part of the outer one's.
            while self._spans and self._spans[-1][0] >= start_time:
                self._spans.pop()
            self._spans.append((start_time, end_time))
