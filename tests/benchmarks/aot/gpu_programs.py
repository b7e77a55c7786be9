"""Compile every program of a GPU that is not there.

`python -m tests.benchmarks.aot.gpu_programs h100 triton`, with jax's CUDA plugin, prints a line of JSON
for each program, see `benchmarks.aot.gpu`.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from benchmarks.aot import gpu
from benchmarks.aot.programs import programs
from pallas_kernels.common import Unsupported
from pallas_kernels.workloads import Setup, Workload, decode_workload, prefill_workload


def corners() -> Iterator[Workload]:
    """Shapes at the edge of what the kernels take, besides those of real models: they need the most registers."""
    yield decode_workload(
        "float32, d 256, 8 bits, Gumbel", Setup(2, 4, 4, 4096, 256, jnp.float32, bits=8, noisy=True), rank=8
    )
    wide: dict[str, Any] = dict(scores="each", slopes=True, window=100, soft_cap=50.0)
    yield decode_workload(
        "bfloat16, d 256, 1000 slots, ALiBi, window, soft cap",
        Setup(1, 1, 16, 1000, 256, jnp.bfloat16, **wide),
    )
    yield prefill_workload(
        "float32, d 128, 16 rows, ALiBi",
        Setup(1, 1, 4, 500, 128, jnp.float32, slopes=True),
        "weights",
        rows=16,
    )
    yield prefill_workload("bfloat16, d 256 and e 16", Setup(1, 1, 4, 500, 256, jnp.bfloat16, e=16), "noise")


def of_gpu() -> list[Workload]:
    """All that have a kernel for GPUs."""
    return [program for program in (*programs(), *corners()) if "gpu" in program.forms]


def main(chip: str, *implementations: str) -> None:
    """Compile what a chip can run of some implementations."""
    os.environ.update(gpu.ENVIRONMENT)
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    for program in of_gpu():
        for implementation in implementations:
            try:
                row = gpu.compile_for(chip, program, implementation)
            except Unsupported:
                if implementation == "pallas":
                    raise
                continue
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
