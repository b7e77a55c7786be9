"""Compile kernels and decode steps for chips without the hardware, and write the compilers' results to `chips.md`.

TPUs need `pip install jax[tpu]`, GPUs the CUDA plugin of jax and ptxas. Each environment makes the rows of its chips
and keeps the rows of others.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import jax

from benchmarks.aot.chips import CHIPS, ENVIRONMENT, SPECIFICATIONS
from benchmarks.aot.page import bundles, markdown, plot
from benchmarks.aot.programs import programs
from benchmarks.aot.rows import Kind, Rows
from benchmarks.aot.tpu import compile_for, mesh_of
from kvjax.utils.files import output_directory
from pallas_kernels.common import Unsupported
from pallas_kernels.workloads import Workload


class Work(NamedTuple):
    """A row to compile."""

    kind: Kind
    name: str
    make: Callable[[], dict[str, Any]]


def wanted(chip: str, implementations: Sequence[str], steps: bool, only: str) -> Iterator[Work]:
    """Yield the rows of a chip whose names contain a text.

    Args:
        chip: one of `SPECIFICATIONS`.
        implementations: names of kernel implementations.
        steps: whether to add whole decode steps; for TPUs only, because no compiler estimates cycles of GPUs.
        only: the text that names must contain.
    """
    form = "tpu" if chip in CHIPS else "gpu"
    for program in programs():
        for implementation in implementations:
            name = f"{program}, {implementation}"
            exists = implementation == "xla" or form in program.forms
            if not exists or only not in name:
                continue

            def kernel(program: Workload = program, implementation: str = implementation) -> dict[str, Any]:
                traffic = {"bytes": program.bytes, "limit": SPECIFICATIONS[chip].limit(program.bytes)}
                return compiler_of(chip)(chip, program, implementation) | traffic

            yield Work("kernels", name, kernel)
    if not steps or chip not in CHIPS:
        return
    # This package imports kvjax only here, and only for decode steps.
    from benchmarks import chip_steps

    for number, step in enumerate(chip_steps.steps()):
        if only in str(step):

            def whole(step: chip_steps.Step = step, number: int = number) -> dict[str, Any]:
                return chip_steps.compile_step(chip, step) | {"number": number}

            yield Work("steps", str(step), whole)


def compiler_of(chip: str) -> Callable[..., dict[str, Any]]:
    """Return the function that compiles a kernel for a chip.

    Raises:
        ModuleNotFoundError: there is no such compiler in this package.
    """
    if chip in CHIPS:
        return compile_for
    # Imported late, because it needs another plugin and a separate environment.
    compiler = importlib.import_module("benchmarks.aot.gpu")
    os.environ.update(compiler.ENVIRONMENT)
    return compiler.compile_for


def compiler_name(chip: str) -> str:
    """Return the name and version of the compiler for a chip.

    Raises:
        RuntimeError: there is no compiler for the chip.
    """
    package = "libtpu" if chip in CHIPS else "jax-cuda12-pjrt"
    try:
        name = f"jax {jax.__version__} with {package} {version(package)}"
        if chip in CHIPS:
            mesh_of(chip)
    except PackageNotFoundError:
        raise RuntimeError(f"the package {package} is not installed") from None
    return name


def show_schedule(name: str, row: dict[str, Any]) -> None:
    """Print the cycles of a row: the regions of its kernels, and the fusions with the most cycles."""
    print(f"{row['chip']} {name}: limit {1e6 * row['limit']:,.1f} µs")
    if row["chip"] not in CHIPS:
        for kernel, registers in row["registers"].items():
            spills, shared, blocks = (row[figure][kernel] for figure in ("spills", "shared", "occupancy"))
            print(
                f"  {registers:14,} registers {kernel}: {spills:,} bytes spilled, {shared:,} shared, {blocks} blocks "
                "on a multiprocessor"
            )
        return
    print(f"  {1e6 * row['estimate']:14,.1f} µs estimated")
    for part, seconds in row.get("parts", {}).items():
        print(f"  {1e6 * seconds:14,.1f} µs {part}")
    for kernel in row["kernels"]:
        copies = f"; {kernel['copies']} copies awaited where they start, in {kernel['waits']} waits"
        more = copies if kernel["copies"] else ""
        print(f"  {kernel['cycles']:14,} cycles {kernel['name']}: {bundles(kernel)}{more}")
    for times, part, cycles, op_name in row["fusions"]:
        print(f"  {cycles:14,} cycles, {times} x {part}: {op_name}")
    for fusion, part, op_name in row["unknown"]:
        print(f"  {'unknown':>14} cycles {fusion} ({part}): {op_name}")
    print(f"  {row['fusion_cycles']:14,} cycles of all fusions that were compiled")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    options = argparse.ArgumentParser(prog="benchmarks.aot", description=__doc__, allow_abbrev=False)
    options.add_argument("--chips", default=",".join(CHIPS), help=f"of {', '.join(SPECIFICATIONS)}, with commas")
    everything = "of kernels, with commas (default: pallas,xla, and of GPUs triton)"
    options.add_argument("--implementations", help=everything)
    options.add_argument("--only", default="", help="programs whose name has this text in it")
    options.add_argument("--steps", action="store_true", help="also whole decode steps")
    options.add_argument("--schedule", action="store_true", help="print regions of kernels and the dearest fusions")
    options.add_argument("--redo", action="store_true", help="compile what is on disk, too: programs have changed")
    options.add_argument("--page", action="store_true", help="compile nothing: write the page of what is on disk")
    options.add_argument("--out", type=output_directory, default="docs/results", help="where chips.md and its rows are")
    parsed = options.parse_args(argv)
    chips = parsed.chips.split(",")
    unknown = [chip for chip in chips if chip not in SPECIFICATIONS]
    if unknown:
        print(f"benchmarks.aot: {', '.join(unknown)} is not one of {', '.join(SPECIFICATIONS)}.", file=sys.stderr)
        return 2
    directory, refused = parsed.out / "chips", 0
    try:
        for chip in [] if parsed.page else chips:
            refused += _compile(chip, parsed, Rows(directory / f"{chip}.json"))
        kept = {chip: rows for chip in SPECIFICATIONS if any((rows := Rows(directory / f"{chip}.json").kept).values())}
        if not kept:
            raise ValueError(f"there are no rows in {directory}; compile some first.")
    except (RuntimeError, ModuleNotFoundError, ValueError) as error:
        print(f"benchmarks.aot: {error}", file=sys.stderr)
        return 2
    (parsed.out / "chips.md").write_text(markdown(kept), encoding="utf-8")
    try:
        plot(kept, directory / "steps.png")
    except ModuleNotFoundError as error:  # environments with compilers may lack matplotlib
        remedy = "pip install matplotlib, and give --page"
        print(f"benchmarks.aot: {directory / 'steps.png'} is as it was ({error}): {remedy}.", file=sys.stderr)
    return 1 if refused else 0


def _compile(chip: str, parsed: argparse.Namespace, rows: Rows) -> int:
    """Compile the missing rows; return the number of programs that the compiler refused."""
    try:
        compiler = compiler_name(chip)
    except Exception as error:  # plugins raise many types if they are missing
        package = "jax[tpu]" if chip in CHIPS else "jax-cuda12-plugin, jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12"
        raise RuntimeError(f"there is no compiler for {chip}, install {package}: {error}") from error
    default = "pallas,xla" if chip in CHIPS else "pallas,triton,xla"
    refused, names = 0, (parsed.implementations or default).split(",")
    works = list(wanted(chip, names, parsed.steps, parsed.only))
    if not works:
        searched = "kernel or step" if parsed.steps else "kernel (and of steps only --steps looks at the names)"
        example = "'fused_decode multi-head' or 'llama_7b, 64 rows, 204 slots, h2o'"
        raise ValueError(f"{parsed.only!r} is in the name of no {searched}; give a part of one, as {example}.")
    for kind, name, make in works:
        row = None if parsed.redo else rows.get(kind, name, compiler)
        if row is None:
            try:
                row = make() | {"compiler": compiler}
                rows.put(kind, name, row)
            except Unsupported as error:
                print(f"{chip} {name} is left out: {error}", file=sys.stderr, flush=True)
                continue
            except Exception as error:  # continue with the other rows after any error
                refused += 1
                reason = str(error).splitlines()[0] if str(error) else repr(error)
                print(f"{chip} {name} FAILED: {reason}", file=sys.stderr, flush=True)
                continue
            print(f"{chip} {name}: {row['temp']:,} temporary bytes, {row['seconds']:.1f} s", flush=True)
        if parsed.schedule:
            show_schedule(name, row)
    return refused


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    raise SystemExit(main())
