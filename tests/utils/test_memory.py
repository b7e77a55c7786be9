"""Memory that a program frees: kept for the next one, until it is returned."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# A thread other than the main one, as XLA's, allocates 100 MB twice; prints page faults of the second time, and MB
# that the process loses when memory is returned.
RUN = """
import resource, sys, threading
import numpy as np
from kvjax.utils.memory import keep_freed_memory, return_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def program():
    for _ in range(2):
        before = faults()
        np.ones(100_000_000, np.uint8)
        counts.append(faults() - before)

if sys.argv[1] == "keep":
    keep_freed_memory()
counts = []
thread = threading.Thread(target=program)
thread.start()
thread.join()
before = resident()
return_memory()
print(counts[1], round((before - resident()) / 1e6))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such settings")
@pytest.mark.parametrize("keeps", (True, False))
def test_freed_memory_is_kept_for_the_next_program(keeps: bool) -> None:
    how = [sys.executable, "-c", RUN, "keep" if keeps else "usual"]
    faults, returned = map(int, subprocess.run(how, capture_output=True, text=True, check=True).stdout.split())
    assert (faults < 100, returned > 90) == (keeps, keeps)
