"""Compile programs for TPUs without the hardware, and read the compiler's output."""

from __future__ import annotations

import functools
import math
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.aot.bundles import Schedule, read_schedule
from benchmarks.aot.chips import CHIPS, LATENCY, SPECIFICATIONS, Chip
from benchmarks.aot.module import Instruction, read_module
from pallas_kernels.benchmark import Program

MEMORY = ("argument", "output", "alias", "temp")
"""Kinds of device memory that the compiler reports for a program; `temp` is the rest."""

DEAREST = 30
"""Number of fusions to keep."""

ARGUMENTS = "LIBTPU_INIT_ARGS"
_DUMP = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
_FILE = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")


class Grid(NamedTuple):
    """The grid of a Pallas kernel in a program."""

    name: str
    sizes: tuple[int, ...]
    parallel: bool
    """True if the cores of one chip may share it."""
    results: tuple[tuple[int, ...], ...]
    """Shapes of the results."""
    traffic: int
    """Bytes of the blocked operands and results; copies by the kernel itself are not included."""
    unknown: int | None = None
    """Index of a size that is known only at run time; the number of steps is then that for whole operands."""
    least: int = 1
    """Minimum number of steps: one for each block of the results."""
    turns: int = 0
    """Maximum number of iterations of a loop at the end of a row, if the kernel's metadata give it (`turns`)."""

    @property
    def steps(self) -> int:
        """Return the number of steps."""
        return math.prod(self.sizes)

    @property
    def rows(self) -> int:
        """Return how often the last dimension restarts."""
        return self.steps // self.sizes[-1] if self.sizes else 1

    def part(self, calls: int) -> Grid:
        """Return the share of one of several calls with common operands, if a size is known only at run time."""
        if self.unknown is None:
            return self
        sizes, others = list(self.sizes), self.steps // self.sizes[self.unknown]
        sizes[self.unknown] = -(-max(self.least, -(-self.steps // calls)) // others)
        smaller = self._replace(sizes=tuple(sizes))
        return smaller._replace(traffic=self.traffic * smaller.steps // self.steps)


class Kernel(NamedTuple):
    """A call of a Pallas kernel, with its costs."""

    instruction: Instruction
    grid: Grid
    schedule: Schedule

    def cycles(self, chip: Chip) -> int:
        """Return the cycles of one core; cores share a parallel grid."""
        shared = chip.cores if self.grid.parallel else 1
        return self.schedule.cycles(-(-self.grid.steps // shared), -(-self.grid.rows // shared), self.grid.turns)

    def waiting(self, chip: Chip) -> float:
        """Return the seconds that grid steps wait for their own copies."""
        shared = chip.cores if self.grid.parallel else 1
        waits = self.schedule.waits * self.grid.steps + self.schedule.rare_waits * self.grid.rows
        return LATENCY * -(-waits // shared)

    def seconds(self, chip: Chip) -> float:
        """Return the longer of the times for cycles and traffic, plus the waiting time."""
        return max(chip.seconds(self.cycles(chip)), chip.limit(self.grid.traffic)) + self.waiting(chip)


class Compiled(NamedTuple):
    """A compiled program."""

    memory: dict[str, int]
    kernels: list[Kernel]
    fusions: list[Instruction]
    """All fusions of XLA, with their estimates."""
    loops: int
    """Loops of XLA, with an unknown number of iterations."""
    seconds: float
    """Seconds of the compilation."""

    def row(self, chip: Chip, class_of: Callable[[Instruction], str] = lambda fusion: fusion.opcode) -> dict[str, Any]:
        """Return the row for the file, with the costliest fusions: their number by class, cycles and origin."""
        dearest = sorted(self.fusions, key=lambda fusion: -fusion.cycles)[:DEAREST]
        alike = Counter((class_of(each), each.cycles, each.op_name) for each in dearest)  # fusions of several layers
        return {
            **self.memory,
            "fusion_cycles": sum(fusion.cycles for fusion in self.fusions),
            "fusions": [[times, *which] for which, times in alike.items()],
            "unknown": [[each.name, class_of(each), each.op_name] for each in self.fusions if not each.estimated],
            "kernels": [kernel_row(kernel, chip) for kernel in self.kernels],
            "loops": self.loops,
            "seconds": self.seconds,
        }


def compile_for(chip: str, program: Program, implementation: str) -> dict[str, Any]:
    """Compile a program for a chip, and return the compiler's memory and cycles.

    Raises:
        Unsupported: the implementation cannot run these shapes.
        RuntimeError: libtpu is not installed, or does not know the chip.
        jax.errors.JaxRuntimeError: the compiler refuses the program.
    """
    mesh = mesh_of(chip)
    shapes = placed(program.shapes, mesh)
    with jax.set_mesh(mesh):  # kernels read the target chip from the mesh
        compiled = compile_traced(program.jit(implementation, "tpu").trace(**shapes))
    row = dict(chip=chip, op=program.op, size=program.label, implementation=implementation)
    known = SPECIFICATIONS[chip]
    estimate = sum(kernel.seconds(known) for kernel in compiled.kernels)
    estimate += sum(known.seconds(fusion.cycles) for fusion in compiled.fusions)
    return row | {"estimate": estimate} | compiled.row(known)


def kernel_row(kernel: Kernel, chip: Chip) -> dict[str, Any]:
    """Return the row of a kernel for the file."""
    return dict(
        kernel.schedule._asdict(),
        name=kernel.instruction.name,
        grid=list(kernel.grid.sizes),
        turns=kernel.grid.turns,
        traffic=kernel.grid.traffic,
        cycles=kernel.cycles(chip),
        waiting=kernel.waiting(chip),
    )


def placed(shapes: Any, mesh: Mesh) -> Any:
    """Return shapes that are replicated on the devices of a mesh."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)


@functools.cache
def mesh_of(chip: str) -> Mesh:
    """Return a mesh of one chip, without the hardware.

    Raises:
        RuntimeError: libtpu is not installed, does not know the chip, or was loaded before.
    """
    from jax.experimental import topologies

    _dumps()
    topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip])
    return Mesh(np.array(topology.devices[:1]), ("one",))


@functools.cache
def _dumps() -> tempfile.TemporaryDirectory[str]:
    # The compiler reads the folder for its schedules only when it is loaded.
    directory = tempfile.TemporaryDirectory(prefix="pallas_kernels_aot_")
    os.environ[ARGUMENTS] = f"{os.environ.get(ARGUMENTS, '')} {_DUMP.format(directory.name)}".strip()
    return directory


def compile_traced(traced: Any) -> Compiled:
    """Compile a traced program for the TPU of its shapes, and read the compiler's output.

    Args:
        traced: result of `jax.jit(function).trace(shapes)`, for shapes on `mesh_of`.

    Raises:
        RuntimeError: there is no schedule of one of its kernels.
        jax.errors.JaxRuntimeError: the compiler refuses the program.
    """
    directory = Path(_dumps().name)
    for file in directory.iterdir():
        file.unlink()
    began = time.perf_counter()
    compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    seconds = time.perf_counter() - began
    memory = compiled.memory_analysis()
    assert memory is not None
    sizes = {name: int(getattr(memory, f"{name}_size_in_bytes")) for name in MEMORY}
    text = compiled.as_text() or ""
    instructions = read_module(text)
    kernels = [each for each in instructions if each.kernel]
    schedules, grids = _schedules(directory), list(grids_of(traced.jaxpr))
    found = [_kernel(each, kernels, grids, schedules) for each in kernels]
    others = [counted(each, instructions, schedules) for each in instructions if not each.kernel]
    return Compiled(sizes, found, others, text.count(" while("), seconds)


def _schedules(directory: Path) -> dict[str, Schedule]:
    matches = ((_FILE.fullmatch(file.name), file) for file in sorted(directory.iterdir()))
    return {
        match[1]: read_schedule(file.read_text())
        for match, file in matches
        if match is not None and not match[1].endswith("schedule-analysis") and not match[1].startswith("<")
    }


def _schedule(each: Instruction, others: list[Instruction], schedules: dict[str, Schedule]) -> Schedule | None:
    # The compiler makes one program for identical calls, under the name of the first.
    alike = (other for other in others if other.base == each.base and sorted(other.results) == sorted(each.results))
    return next((schedules[name] for name in (each.name, *(other.name for other in alike)) if name in schedules), None)


def counted(each: Instruction, others: list[Instruction], schedules: dict[str, Schedule]) -> Instruction:
    """Return an instruction with the bundles of its schedule, if it has no estimate; a lower bound if it has loops.

    Args:
        each: an instruction of a module.
        others: all instructions of the module.
        schedules: schedules of the compiler, by name.
    """
    schedule = None if each.estimated else _schedule(each, others, schedules)
    if schedule is None or each.opcode == "fusion":
        return each
    return each._replace(cycles=schedule.cycles(1, 1), estimated=schedule.inner == 0)


def _kernel(each: Instruction, kernels: list[Instruction], grids: list[Grid], schedules: dict[str, Schedule]) -> Kernel:
    def alike(results: tuple[tuple[int, ...], ...]) -> bool:
        return sorted(results) == sorted(each.results)

    schedule = _schedule(each, kernels, schedules)
    named = [grid for grid in grids if grid.name == each.base]
    grid = next((grid for grid in named if alike(grid.results)), named[0] if named else None)
    if schedule is None or grid is None:
        raise RuntimeError(
            f"the compiler left no schedule of the kernel {each.name} (there are those of {', '.join(schedules)}): "
            f"load libtpu with {ARGUMENTS} as {__name__} sets it."
        )
    return Kernel(each, grid, schedule)


def grids_of(jaxpr: Any) -> Iterator[Grid]:
    """Yield the grids of the Pallas kernels that a jaxpr calls, including calls of nested functions."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield _grid(equation)
            continue
        for inner in jaxprs_in_params(equation.params):
            yield from grids_of(inner)


def _grid(equation: Any) -> Grid:
    mapping, given = equation.params["grid_mapping"], equation.params["compiler_params"]
    arrays = [variable.aval for variable in (*equation.invars, *equation.outvars)][-len(mapping.block_mappings) :]
    pairs = list(zip(arrays, mapping.block_mappings, strict=True))
    blocked, returned = (
        [(array, block) for array, block in some if _comes_in_blocks(block)]
        for some in (pairs, pairs[-len(equation.outvars) :])
    )
    sizes, traffic = list(mapping.grid), sum(array.size * array.dtype.itemsize for array, _ in blocked)
    unknown = next((axis for axis, size in enumerate(sizes) if not isinstance(size, int)), None)
    least = max((_blocks(array.shape, block) for array, block in returned), default=1)
    if unknown is not None:  # one step for each block of the largest operand
        others = math.prod(sizes[:unknown] + sizes[unknown + 1 :])
        sizes[unknown] = -(-max(_blocks(array.shape, block) for array, block in blocked) // others)
        traffic = math.prod(sizes) * sum(math.prod(_sizes(block)) * array.dtype.itemsize for array, block in blocked)
    return Grid(
        name=equation.params["name"] or "",
        sizes=tuple(sizes),
        parallel="parallel" in (getattr(given, "dimension_semantics", None) or ()),
        results=tuple(tuple(variable.aval.shape) for variable in equation.outvars),
        traffic=traffic,
        unknown=unknown,
        least=least,
        turns=int(dict(equation.params["metadata"] or {}).get("turns", 0)),
    )


def _comes_in_blocks(block: Any) -> bool:
    space = block.transformed_block_aval.memory_space
    return str(space) not in ("any", "hbm")


def _blocks(shape: tuple[int, ...], block: Any) -> int:
    return math.prod(-(-length // size) for length, size in zip(shape, _sizes(block), strict=True))


def _sizes(block: Any) -> list[int]:
    # A dimension that the block shape omits has size one.
    sizes = (getattr(size, "block_size", size) for size in block.block_shape)
    return [size if isinstance(size, int) else 1 for size in sizes]
