"""Compile the kernels for TPUs that are not there: `python -m pallas_kernels.aot`, with `pip install jax[tpu]`."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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

Shape = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Program:
    """An operation at one size."""

    op: str
    label: str
    run: Callable[..., Any]
    """Called with `shapes` by name, and with `implementation` and `platform`."""
    shapes: dict[str, Any]
    donated: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ("pallas", "xla")

    def __str__(self) -> str:
        return f"{self.op} {self.label}"

    def lower(self, implementation: str, platform: str, shapes: dict[str, Any] | None = None) -> jax.stages.Lowered:
        """The program for a `platform` (`tpu`, `cuda`), which need not be there.

        Raises:
            Unsupported: the implementation cannot run these shapes there.
        """
        run = functools.partial(self.run, implementation=implementation, platform=platform)
        traced = jax.jit(run, donate_argnames=self.donated).trace(**(self.shapes if shapes is None else shapes))
        return traced.lower(lowering_platforms=(platform,))


def programs() -> Iterator[Program]:
    """Every operation at sizes of real models, and at odd ones."""
    yield from _decode_attention()
    yield from _prefill_scores()
    yield from _less_kernels()


def _decode_attention() -> Iterator[Program]:
    from pallas_kernels.decode_attention import Gumbel, LowRank, decode_attention

    def run(seed=None, tau=None, low_rank=None, scores=None, **arrays):
        low_rank = None if low_rank is None else LowRank(*low_rank)
        scores = scores if seed is None or tau is None else Gumbel(seed, tau)
        return decode_attention(**arrays, low_rank=low_rank, scores=scores)

    def make(label, b, h, g, c, d, dtype, *, scores=None, rank=0, slopes=False, noisy=False, window=None):
        shapes: dict[str, Any] = {
            "q": Shape((b, h, g, d), dtype),
            "k": Shape((b, h, c, d), dtype),
            "v": Shape((b, h, c, d), dtype),
            "position": Shape((b, h, c), jnp.int32),
            "query_position": Shape((b,), jnp.int32),
        }
        if noisy:
            shapes |= {"seed": Shape((b,), jnp.uint32), "tau": Shape((b,), jnp.float32)}
        if slopes:
            shapes["slopes"] = Shape((h, g), jnp.float32)
        if rank:
            sizes = ((b, h, g, rank), (b, h, rank, d), (b, h, rank))
            shapes["low_rank"] = tuple(Shape(size, jnp.float32) for size in sizes)
        return Program("decode_attention", label, functools.partial(run, scores=scores, window=window), shapes)

    half, whole = jnp.bfloat16, jnp.float32
    yield make("8 heads x 4, 4096 slots, d 128, bfloat16", 32, 8, 4, 4096, 128, half)
    yield make("the same with Gumbel scores and rank 8", 32, 8, 4, 4096, 128, half, rank=8, noisy=True)
    yield make("the same with every probability", 32, 8, 4, 4096, 128, half, scores="each")
    yield make("multi-head, 204 slots, rank 8", 64, 32, 1, 204, 128, half, rank=8, scores="sum")
    yield make("multi-query x 16, 65536 slots, d 256", 1, 1, 16, 65536, 256, half, scores="sum")
    yield make("float32, d 64, ALiBi, window", 2, 4, 4, 1024, 64, whole, slopes=True, scores="each", window=512)
    yield make("embedded model, 64 slots", 1, 2, 2, 64, 32, whole, scores="sum")


def _prefill_scores() -> Iterator[Program]:
    from pallas_kernels.prefill_scores import prefill_scores

    def make(label, b, h, g, n, c, d, dtype, *extra, **settings):
        shapes = {
            "q": Shape((b, h, g, n, d), dtype),
            "k": Shape((b, h, c, d), dtype),
            "v": Shape((b, h, c, d), dtype),
            "query_position": Shape((b, n), jnp.int32),
            "key_position": Shape((b, h, c), jnp.int32),
        }
        shapes |= {"noise": Shape((b, h, c), jnp.float32)} if "noise" in extra else {}
        shapes |= {"weights": Shape((b, 1, n), jnp.float32)} if "weights" in extra else {}
        return Program("prefill_scores", label, functools.partial(prefill_scores, **settings), shapes)

    half, whole = jnp.bfloat16, jnp.float32
    yield make("8 heads x 4, 8192 tokens, d 128, bfloat16", 1, 8, 4, 8192, 8192, 128, half)
    yield make("the same without scores", 1, 8, 4, 8192, 8192, 128, half, scores=False)
    yield make("the same with Gumbel scores at temperature 2", 1, 8, 4, 8192, 8192, 128, half, "noise", tau=2.0)
    yield make("512 tokens after 1024 slots, weights", 2, 4, 1, 512, 1536, 64, half, "weights", window=256)
    yield make("float32, d 256, 1000 tokens", 1, 1, 4, 1000, 1000, 256, whole, "noise")
    yield make("embedded model, 48 tokens", 1, 2, 2, 48, 48, 32, whole)


def _less_kernels() -> Iterator[Program]:
    from pallas_kernels.less_kernels import phi, psi

    def make(op, label, x, heads, d, hidden=512, features=8, dtype=jnp.bfloat16):
        def weight(*shape):
            return Shape((*heads, *shape), jnp.float32)

        shapes = {"first": weight(d, hidden), "second": weight(hidden, features)}
        if op is phi:
            return Program("less_kernels", f"phi, {label}", op, {"q": Shape((*x, d), dtype), **shapes})
        shapes |= {"third": weight(features, features), "outer_scale": weight(features)}
        shapes |= {"k": Shape((*x, d), dtype), "residual_scale": weight(features)}
        return Program("less_kernels", f"psi, {label}", op, shapes)

    yield make(phi, "one token of 64 rows, 32 heads, d 128", (64, 32, 1, 1), (32, 1), 128)
    yield make(psi, "one token of 64 rows, 32 heads, d 128", (64, 32, 1), (32,), 128)
    yield make(phi, "4096 tokens, 8 heads x 4, d 128", (1, 8, 4, 4096), (8, 4), 128)
    yield make(psi, "4096 tokens, 8 heads, d 128", (1, 8, 4096), (8,), 128)
    yield make(psi, "float32, d 256, hidden 2048", (1, 1, 100), (1,), 256, 2048, 16, jnp.float32)


def compile_for(chip: str, program: Program, implementation: str) -> dict[str, Any]:
    """Compile a program for a chip, and say what memory the compiler gives it.

    Raises:
        Unsupported: the implementation cannot run these shapes.
        RuntimeError: libtpu is not installed, or does not know the chip.
        jax.errors.JaxRuntimeError: the compiler refuses the program.
    """
    mesh = _mesh(chip)

    def placed(shape):
        return Shape(shape.shape, shape.dtype, sharding=NamedSharding(mesh, PartitionSpec()))

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
                if implementation not in program.implementations:
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
