"""Compiled programs: memory that making them leaves behind."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import pytest
from jax import monitoring

from kvjax.utils.compilation import Compiling


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_programs_that_are_read_are_counted_apart() -> None:
    event = "/jax/core/compile/backend_compile_duration"
    with Compiling() as compiling:
        monitoring.record_event("/jax/compilation_cache/cache_hits")
        for _ in range(2):
            monitoring.record_event_time_span(event, 0.0, 0.01)
        monitoring.record_event("/jax/compilation_cache/cache_misses")
    monitoring.record_event("/jax/compilation_cache/cache_hits")
    assert (compiling.programs, compiling.read) == (2, 1)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries return memory themselves")
def test_memory_of_a_compiler_goes_back_to_the_system() -> None:
    size, event = 100_000_000, "/jax/core/compile/backend_compile_duration"
    with Compiling() as compiling:
        blocks = [np.ones(50_000, np.uint8) for _ in range(size // 50_000)]
        del blocks[:-1]  # the last one is above the others, so the heap cannot shrink
        before = resident()
        monitoring.record_event_time_span(event, 0.0, 0.01)
        assert before - resident() < size / 4
        monitoring.record_event_time_span(event, 1.0, 2.0)
        assert before - resident() > size / 2
    assert (compiling.programs, len(blocks)) == (2, 1)
