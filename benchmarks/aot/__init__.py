"""Ahead-of-time compilation of kernels for other chips: `python -m benchmarks.aot`."""

from benchmarks.aot.chips import CHIPS, ENVIRONMENT, SPECIFICATIONS
from benchmarks.aot.tpu import compile_for, mesh_of

__all__ = ["CHIPS", "ENVIRONMENT", "SPECIFICATIONS", "compile_for", "mesh_of"]
