"""Memory of the process that is freed: kept for the next program, or returned to the system."""

from __future__ import annotations

import ctypes
import sys

_KEPT = 2**30
"""Bytes at the end of the heap that stay with the process."""
# Parameters of mallopt, from malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """Keep up to a gigabyte of freed memory for the next program on a CPU; call this before JAX is used.

    Without it glibc returns every block of more than 32 MB to the system at once. Each program of a large prompt,
    often one per layer, then gets its temporary memory page by page again. With other C libraries it does nothing.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_TRIM_THRESHOLD, _KEPT)
        mallopt(_MMAP_MAX, 0)
        mallopt(_ARENA_MAX, 1)  # heaps of other threads cannot hold large blocks


def return_memory() -> None:
    """Return freed memory to the system; glibc keeps what a compiler frees, which can be more than a model takes."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
