"""Compile the kernels for TPUs that are not there: `python -m pallas_kernels.aot`, with `pip install jax[tpu]`."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.programs import Program, programs

CHIPS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
"""Names of the topologies that libtpu is asked for, of the smallest slices."""

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # the metadata server of a cloud that this is not
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile at once: none of them has a chip
}

MEMORY = ("argument", "output", "alias", "temp")
"""What the compiler says of a program's bytes in device memory; `temp` is what it needs besides."""


def compile_for(chip: str, program: Program, implementation: str) -> dict[str, Any]:
    """Compile a program for a chip, and say what memory the compiler gives it.

    Raises:
        Unsupported: the implementation cannot run these shapes.
        RuntimeError: libtpu is not installed, or does not know the chip.
        jax.errors.JaxRuntimeError: the compiler refuses the program.
    """
    mesh = _mesh(chip)

    def placed(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    began = time.perf_counter()
    with jax.set_mesh(mesh):  # kernels ask the mesh for which chip they are lowered
        compiled = program.lower(implementation, "tpu", jax.tree.map(placed, program.shapes)).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    sizes = {name: getattr(memory, f"{name}_size_in_bytes") for name in MEMORY}
    row = dict(chip=chip, op=program.op, size=program.label, implementation=implementation)
    return row | sizes | {"seconds": time.perf_counter() - began}


@functools.cache
def _mesh(chip: str) -> Mesh:
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip])
    return Mesh(np.array(topology.devices[:1]), ("one",))


def markdown(rows: list[dict[str, Any]]) -> str:
    """The compiler's figures as a table, with one column of temporary bytes for each chip."""
    from importlib.metadata import version

    chips = list(dict.fromkeys(row["chip"] for row in rows))
    lines = [
        "# Kernels compiled for TPU",
        "",
        f"By `python -m pallas_kernels.aot` without a TPU, with jax {jax.__version__} and libtpu {version('libtpu')}.",
        "Megabytes in device memory: what a program takes and gives, what of it lies in place, and what it needs",
        "besides on each chip. It says that the kernels compile and fit, not how fast they are.",
        "",
        "| operation | size | implementation | arguments | output | in place | " + " | ".join(chips) + " |",
        "|---|---|---|--:|--:|--:|" + "--:|" * len(chips),
    ]
    table: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        table.setdefault((row["op"], row["size"], row["implementation"]), {})[row["chip"]] = row
    for names, by_chip in table.items():
        first = next(iter(by_chip.values()))
        sizes = [first[name] for name in ("argument", "output", "alias")]
        sizes += [by_chip[chip]["temp"] if chip in by_chip else None for chip in chips]
        cells = [*names, *("" if size is None else f"{size / 1e6:.2f}" for size in sizes)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """The command line; returns its exit code."""
    options = argparse.ArgumentParser(prog="pallas_kernels.aot", description=__doc__, allow_abbrev=False)
    options.add_argument("--chips", default=",".join(CHIPS), help="names with commas between them")
    options.add_argument("--implementations", default="pallas,xla", help="names with commas between them")
    options.add_argument("--only", default="", help="programs whose name has this text in it")
    options.add_argument("--output", type=Path, help="write the table to this file")
    options.add_argument("--json", type=Path, help="write the numbers to this file")
    parsed = options.parse_args(argv)
    unknown = set(parsed.chips.split(",")) - CHIPS.keys()
    if unknown:
        print(f"pallas_kernels.aot: {', '.join(unknown)} is not one of {', '.join(CHIPS)}.", file=sys.stderr)
        return 2
    rows, refused = [], 0
    wanted = [program for program in programs() if parsed.only in str(program)]
    for chip in parsed.chips.split(","):
        try:
            _mesh(chip)
        except Exception as error:
            print(f"pallas_kernels.aot: there is no compiler for {chip}, install jax[tpu]: {error}", file=sys.stderr)
            return 2
        for program in wanted:
            for implementation in parsed.implementations.split(","):
                if implementation == "pallas" and "tpu" not in program.forms:
                    continue
                try:
                    rows.append(compile_for(chip, program, implementation))
                    print(f"{chip} {program}, {implementation}: {rows[-1]['temp']:,} temporary bytes", flush=True)
                except Exception as error:  # whatever a compiler raises; all of them are wanted
                    refused += 1
                    reason = str(error).splitlines()[0] if str(error) else repr(error)
                    print(f"{chip} {program}, {implementation} FAILED: {reason}", file=sys.stderr, flush=True)
    if parsed.output and rows:
        parsed.output.write_text(markdown(rows))
    if parsed.json:
        parsed.json.write_text(json.dumps({"jax": jax.__version__, "refused": refused, "rows": rows}, indent=1))
    return 1 if refused else 0


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    raise SystemExit(main())
