"""Compile whole programs for GPUs without the hardware, and report the resources of their kernels.

This needs jax-cuda12-plugin, jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12, and for `triton` jax-triton. It needs no
driver.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.aot.gpus import GPUS, WARP
from pallas_kernels.benchmark import Program

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # for libraries that are needed only to run programs
}
"""Environment variables to set before jax looks for devices."""

MEMORY = ("argument", "output", "alias", "temp")
"""Kinds of device memory that the compiler reports for a program; `temp` is the rest."""


def compile_for(chip: str, program: Program, implementation: str) -> dict[str, Any]:
    """Compile a program for a GPU down to its machine code, and return the compilers' report.

    Args:
        chip: one of `GPUS`.
        program: one of `programs()`.
        implementation: an implementation of the operation.

    Returns:
        chip, op, size, implementation; bytes of argument, output, alias and temp; seconds, of all compilers together;
        and by the name of each kernel, XLA's own among them, registers (of a thread), spills (bytes stored by a
        thread), shared (bytes of a block) and occupancy (resident blocks of a multiprocessor). For several kernels with
        one name in a program, it has the worst of them.

    Raises:
        Unsupported: the implementation cannot run these shapes.
        RuntimeError: the compiler for GPUs is not installed.
        jax.errors.JaxRuntimeError: the compiler refuses the program.
    """
    mesh = gpu_mesh(chip)

    def placed(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as dump:
        with jax.set_mesh(mesh):  # kernels read the target chip from the mesh
            traced = program.jit(implementation, "gpu").trace(**jax.tree.map(placed, program.shapes))
            lowered = traced.lower(lowering_platforms=("cuda",))
            compiled = lowered.compile(compiler_options={"xla_dump_to": dump, "xla_dump_emitter_re": ".*"})
        kernels = [*_of_xla(Path(dump)), *_of_triton(lowered)]
        resources = [_assembled(kernel) for kernel in kernels]
    seconds = time.perf_counter() - began
    memory = compiled.memory_analysis()
    assert memory is not None
    row: dict[str, Any] = dict(chip=chip, op=program.op, size=program.label, implementation=implementation)
    row |= {name: getattr(memory, f"{name}_size_in_bytes") for name in MEMORY}
    row |= {name: {} for name in ("registers", "spills", "shared", "occupancy")}
    for kernel, (registers, spills, shared) in zip(kernels, resources, strict=True):
        living = GPUS[chip].occupancy(kernel.threads, registers, shared)
        told = {"registers": registers, "spills": spills, "shared": shared, "occupancy": living}
        for name, number in told.items():
            worst = min if name == "occupancy" else max
            row[name][kernel.name] = worst(number, row[name].get(kernel.name, number))
    return row | {"seconds": seconds}


@functools.cache
def gpu_mesh(chip: str) -> Mesh:
    """Return a mesh with one device of a chip in `GPUS`, without the hardware.

    Raises:
        RuntimeError: the compiler for GPUs is not installed.
    """
    from jax.experimental import topologies

    settings = dict(topology="1x1x1", target_config=GPUS[chip].configuration)
    try:
        found = topologies.get_topology_desc(platform="cuda", topology_name=chip, **settings)
    except Exception as error:  # plugins raise many types if they are missing
        reason = (str(error).splitlines() or [repr(error)])[0].rstrip(".")
        raise RuntimeError(
            f"there is no compiler for {chip} here ({reason}); pip install jax-cuda12-plugin jax-cuda12-pjrt "
            f"nvidia-cuda-nvcc-cu12, of jax's version {jax.__version__}."
        ) from error
    return Mesh(np.array(found.devices), ("one",))


class _Kernel(NamedTuple):
    name: str
    entry: str
    """The kernel's name in PTX."""
    ptx: str
    threads: int
    shared: int
    """Bytes of a block that are set at launch, besides those declared in PTX."""
    of_triton: bool = False


def _of_xla(dump: Path) -> Iterator[_Kernel]:
    # The list of launches has threads and shared memory; only machine code has registers.
    launch = re.compile(r"(\w+) grid: \[[^]]*] threads: \[(\d+), (\d+), (\d+)]\s+shared_memory: (\d+) bytes")
    launches: dict[str, tuple[int, int]] = {}
    for file in dump.glob("*thunk_sequence.txt"):
        for name, x, y, z, shared in launch.findall(file.read_text()):
            launches[name] = int(x) * int(y) * int(z), int(shared)
    for file in dump.glob("*.ptx"):
        ptx = file.read_text()
        for name in re.findall(r"\.entry (\w+)", ptx):
            if name in launches:  # not of a candidate that autotuning rejected
                yield _Kernel(name, name, ptx, *launches[name])


def _of_triton(lowered: jax.stages.Lowered) -> Iterator[_Kernel]:
    # jax-triton compiles to PTX when it lowers, and passes the PTX in a message (jaxlib/gpu/triton.proto).
    module = lowered.compiler_ir("stablehlo")
    assert module is not None
    for attributes in _custom_calls(module.operation, "triton_kernel_call"):
        call = fields_of(zlib.decompress(attributes["backend_config"].value_bytes))
        kernel = fields_of(fields_of(call[1])[1])
        name, entry, ptx = (text.decode() for text in (call[4], kernel[1], kernel[4]))
        yield _Kernel(name, entry, ptx, WARP * kernel[2], kernel.get(3, 0), of_triton=True)


def _custom_calls(operation: Any, target: str) -> Iterator[Any]:
    # The attributes of calls of a target, in an operation and all nested operations.
    attributes = operation.attributes
    if operation.name == "stablehlo.custom_call" and attributes["call_target_name"].value == target:
        yield attributes
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _custom_calls(inner.operation, target)


def fields_of(message: bytes) -> dict[int, Any]:
    """Return the last value of each field of a protocol buffer message: integers, or the bytes of other types."""
    found: dict[int, Any] = {}
    place = 0

    def integer() -> int:
        nonlocal place
        number = shift = 0
        while True:
            byte = message[place]
            place, number, shift = place + 1, number | (byte & 127) << shift, shift + 7
            if byte < 128:
                return number

    while place < len(message):
        field, kind = divmod(integer(), 8)
        if kind == 0:
            found[field] = integer()
            continue
        size = integer() if kind == 2 else {1: 8, 5: 4}[kind]
        found[field], place = message[place : place + size], place + size
    return found


def _assembled(kernel: _Kernel) -> tuple[int, int, int]:
    """Return registers per thread, bytes that a thread spills, and all shared memory of a block."""
    told = _said(kernel).partition(f"entry function '{kernel.entry}'")[2]

    def number(pattern: str) -> int:
        found = re.search(pattern, told)
        return int(found[1]) if found else 0

    shared = kernel.shared + number(r"(\d+) bytes smem")
    return number(r"Used (\d+) registers"), number(r"(\d+) bytes spill stores"), shared


def _said(kernel: _Kernel) -> str:
    target = re.search(r"^\.target (sm_(\d+)\w*)", kernel.ptx, re.MULTILINE)
    assert target is not None
    assembler = _assembler(int(target[2]) if kernel.of_triton else None)
    command = [assembler, "-v", f"-arch={target[1]}", "-", "-o", os.devnull]
    said = subprocess.run(command, input=kernel.ptx, capture_output=True, text=True, check=False)
    if said.returncode:
        raise RuntimeError(f"ptxas refuses {kernel.name}: {said.stderr.strip()}")
    return said.stderr


@functools.cache
def _assembler(of_triton: int | None) -> str:
    # Triton writes the PTX version of its own assembler for a compute capability; other assemblers may not read it.
    if of_triton is not None:
        return importlib.import_module("triton.backends.nvidia.compiler").get_ptxas(of_triton).path
    spec = importlib.util.find_spec("nvidia.cuda_nvcc")
    for place in (spec and spec.submodule_search_locations) or ():
        if (file := Path(place) / "bin" / "ptxas").exists():
            return str(file)
    found = shutil.which("ptxas")
    if found is None:
        raise RuntimeError("there is no ptxas here; pip install nvidia-cuda-nvcc-cu12.")
    return found
