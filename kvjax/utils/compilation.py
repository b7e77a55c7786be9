"""Compiled programs: where they are kept from one process to the next, and the time that making them takes."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import jax
from jax import monitoring

_MAKING = "/jax/core/compile/"
_MADE = "/jax/core/compile/backend_compile_duration"
_MANY_MAPPINGS = 40_000
"""Of the 65530 memory mappings that Linux allows a process; without one XLA ends it."""


def enable_compilation_cache(directory: str | Path | None = None) -> None:
    """Keep compiled programs on disk, so that the next process need not compile them; call it before anything else.

    Args:
        directory: where; None for the one that the environment variable `KVJAX_CACHE_DIR` names, or else
            `kvjax/xla` in the user's cache directory (`XDG_CACHE_HOME`, `~/.cache`). If the variable is set and empty,
            nothing is kept.
    """
    chosen = cache_directory() if directory is None else directory
    if chosen:
        jax.config.update("jax_compilation_cache_dir", str(chosen))
        # Small programs, too: a start makes dozens of them, and each is read in a tenth of the time it is made in.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def cache_directory() -> Path | None:
    """What `KVJAX_CACHE_DIR` names, or else `kvjax/xla` in the user's cache directory; None where it is empty."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    chosen = os.environ.get("KVJAX_CACHE_DIR", str(Path(base) / "kvjax" / "xla"))
    return Path(chosen) if chosen else None


def version() -> str:
    """The installed version of kvjax, or that of the checkout."""
    import importlib.metadata  # slow to import, as is what it needs
    import tomllib

    try:
        return importlib.metadata.version("kvjax")
    except importlib.metadata.PackageNotFoundError:
        project = Path(__file__).resolve().parents[2] / "pyproject.toml"
        return tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]


def drop_programs() -> None:
    """Forget all compiled programs if there are so many that the process would soon be out of memory mappings.

    Each takes some; for what runs long and compiles much, such as grids of measurements.
    """
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MANY_MAPPINGS:
        jax.clear_caches()
        gc.collect()


def temporary_bytes(programs: Iterable[jax.stages.Lowered]) -> int | None:
    """The most that one of some programs takes beside its arguments and results, as the compiler says; or None.

    Nothing is compiled for a program that has been called with arguments of the same shapes.
    """
    found = [program.compile().memory_analysis() for program in programs]
    return max((memory.temp_size_in_bytes for memory in found if memory is not None), default=None)


class Compiling:
    """The seconds that go into programs inside a `with` block: tracing, lowering, and compiling or fetching them."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        self.programs = 0
        """Made or fetched so far, by any thread."""
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return sum(end - start for start, end in self._spans)

    def lap(self) -> float:
        """Seconds since the last lap, or since the block began, that went into anything but programs."""
        before, self._lap = self._lap, (time.perf_counter(), self.seconds)
        return self._lap[0] - before[0] - (self._lap[1] - before[1])

    def __enter__(self) -> Self:
        self._lap = time.perf_counter(), 0.0
        monitoring.register_event_time_span_listener(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        monitoring.unregister_event_time_span_listener(self._note)

    def _note(self, event: str, start_time: float, end_time: float, **_: str | int) -> None:
        if not event.startswith(_MAKING):
            return
        with self._lock:
            self.programs += event == _MADE
            # A function that is traced inside another one is told of first, and its time is the other one's, too.
            while self._spans and self._spans[-1][0] >= start_time:
                self._spans.pop()
            self._spans.append((start_time, end_time))
