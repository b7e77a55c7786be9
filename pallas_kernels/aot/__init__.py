"""Kernels compiled for chips that are not there: `python -m pallas_kernels.aot`."""

from pallas_kernels.aot.chips import CHIPS, ENVIRONMENT, SPECIFICATIONS
from pallas_kernels.aot.tpu import compile_for, mesh_of

__all__ = ["CHIPS", "ENVIRONMENT", "SPECIFICATIONS", "compile_for", "mesh_of"]
