"""Compiled programs: memory that making them leaves behind, and the directory that keeps them."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import monitoring

from kvjax.utils import compilation
from kvjax.utils.compilation import Compiling, enable_compilation_cache, one_line_warnings


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


@pytest.fixture
def cache_settings() -> Iterator[None]:
    """Put JAX's settings back."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: jax.config.values[name] for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("cache_settings")
def test_a_directory_that_keeps_no_programs_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enable_compilation_cache(tmp_path / "kept")
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "kept")
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match=r"cannot be kept in .*file/xla \(Not a directory\); set KVJAX_CACHE_DIR"):
        enable_compilation_cache(tmp_path / "file" / "xla")
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "kept")

    def full(directory: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(compilation, "_check_room", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        enable_compilation_cache(tmp_path)  # programs are read from it
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path)
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == float("inf")


def test_a_directory_that_fills_up_is_one_line_of_a_command() -> None:
    line = one_line_warnings()
    failure = "Error writing persistent compilation cache entry for '{}': OSError: [Errno 28] No space left on device"
    said = [line(failure.format(name), UserWarning, "", 0) for name in ("jit_a", "jit_b")]
    assert "OSError: [Errno 28] No space left on device); set KVJAX_CACHE_DIR" in said[0] and said[1] == ""
    assert line("other", UserWarning, "", 0) == "kvjax: other\n"
