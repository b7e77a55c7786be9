"""Memory and collectives of decode steps by number of devices, also without the hardware: `kvjax bench scale`."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from typing import Any

import jax
import numpy as np

from benchmarks.footprint import footprint
from benchmarks.models import config_named
from benchmarks.targets import HERE, VIRTUAL, devices_of, mesh_shape
from kvjax.cli.bench import BenchEntry, add_bench_options, bench_entries, say
from kvjax.cli.commands import Parser, finish
from kvjax.evaluation.bench import decoder, race, random_model, shaped_model
from kvjax.evaluation.refusals import Unsupported, refusals
from kvjax.inference.decode import lower_step
from kvjax.inference.shapes import state_shapes
from kvjax.methods.registry import policy
from kvjax.models.config import ModelConfig
from kvjax.models.sharding import mesh_of
from kvjax.utils.files import output_file, write_text

Row = dict[str, Any]
_ONE_CPU = (
    "No tokens per second: virtual devices share the cores of one CPU; --throughput times those at hand all the same."
)


def run(options: argparse.Namespace) -> None:
    """Compile what the command line names, and print and write a table.

    Raises:
        ValueError: the model, policy or target does not exist, or the options are incompatible.
    """
    meshes = [mesh_shape(text) for text in options.mesh.split(",")]
    named: list[BenchEntry] = [("full", policy("full"), 1.0), *bench_entries(options)]
    if any(budget == "same" for _, _, budget in named):
        raise ValueError("budget 'same' is for races; give slots or fractions.")
    config = config_named(options.model)
    devices = devices_of(options.target, max(map(math.prod, meshes)))
    if any(options.batch % data for data, *_ in meshes):
        raise ValueError(f"--batch {options.batch} cannot be divided among the devices along data of {options.mesh}.")
    timed = options.throughput or (options.target == HERE and jax.default_backend() != "cpu")
    if timed and options.target != HERE:
        raise ValueError(f"--throughput is for devices at hand, not for {options.target}; leave out --for.")
    rows = []
    for shape, entry in itertools.product(meshes, named):
        try:
            with refusals():  # of policies that need a tokenizer, or more of a model than shapes
                row = _row(options, config, devices, shape, entry)
                speed = _throughput(options, config, devices, row, entry) if timed else None
        except Unsupported as error:
            say(f"{entry[0]} at {entry[2]} is left out: {error}")
            continue
        rows.append(row | {"tokens_per_second": speed})
    if len(named) > 1 and {row["policy"] for row in rows} == {"full"}:
        raise ValueError("no policy is left to benchmark, for the reasons above.")
    kind = devices[0].device_kind
    title = f"a decode step: {options.model}, {_sizes(options)}; {kind}, jax {jax.__version__}"
    table(title, rows, config.layers)
    if not timed:
        virtual = options.target in (HERE, VIRTUAL)
        print(_ONE_CPU if virtual else "No tokens per second: the devices are not there.")
    if options.json:
        write_text(options.json, json.dumps({"title": title, "rows": rows}, indent=1))


def _sizes(options: argparse.Namespace) -> str:
    weights = "" if options.weights is None else f", weights in {options.weights}"
    return (
        f"{options.dtype}{weights}, {options.batch} rows of {options.prompt_tokens} tokens and {options.new_tokens} new"
    )


def _row(
    options: argparse.Namespace, config: ModelConfig, devices: list[Any], shape: tuple[int, ...], entry: BenchEntry
) -> Row:
    name, chosen, budget = entry
    written = "x".join(map(str, shape if shape[2] > 1 else shape[:2]))
    say(f"compiling {name} at {budget} for {written}")
    model = shaped_model(config, options.dtype, options.weights, mesh_of(devices, shape))
    sizes = options.batch, options.prompt_tokens
    state = state_shapes(
        model,
        chosen,
        *sizes,
        budget,  # type: ignore[arg-type]
        max_new_tokens=options.new_tokens,
        implementation=options.implementation,
    )
    found = footprint(lower_step(state))
    mesh = dict(mesh=written, devices=math.prod(shape))
    return mesh | dict(policy=name, budget=budget) | found._asdict()


def _throughput(
    options: argparse.Namespace, config: ModelConfig, devices: list[Any], row: Row, entry: BenchEntry
) -> float:
    mesh = mesh_of(devices, mesh_shape(row["mesh"]))
    model = random_model(config, options.dtype, options.weights, mesh)
    tokens = np.random.default_rng(0).integers(3, config.vocab_size, (options.batch, options.prompt_tokens))
    contender = decoder(model, entry[1], entry[2], tokens, options.new_tokens)  # type: ignore[arg-type]
    race([contender], options.repeats)
    return options.batch * options.new_tokens / contender.median


def table(title: str, rows: list[Row], layers: int) -> None:
    """Print a row for each mesh and policy."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=title)
    sizes = ("weights MB", "caches MB", "temporary MB", "all MB")
    timed = any(row["tokens_per_second"] is not None for row in rows)
    for heading in ("mesh", "policy", "budget", *sizes, "collectives", "a layer", *(("tokens/s",) if timed else ())):
        shown.add_column(heading, justify="left" if heading in ("mesh", "policy", "collectives") else "right")
    for row in rows:
        each = [row[f"{name}_bytes"] for name in ("weight", "cache", "temporary")]
        kinds = ", ".join(f"{count} {kind}" for kind, count in row["collectives"].items())
        speed = [f"{row['tokens_per_second']:,.0f}"] if timed else []
        shown.add_row(
            row["mesh"], row["policy"], str(row["budget"]), *(f"{size / 1e6:,.1f}" for size in (*each, sum(each))),
            kinds or "none", f"{sum(row['collectives'].values()) / layers:.1f}", *speed,
        )  # fmt: skip
    Console(width=130).print(shown)
    print("Bytes are those of one device; collectives those of one step.")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    options = Parser(prog="kvjax bench scale", description=__doc__)
    options.add_argument(
        "--model",
        default="synthetic",
        help="a shape, no weights are read: toy, synthetic, llama-7b, llama-70b, llama-405b, tiny, or a directory with "
        "a config.json",
    )
    options.add_argument(
        "--mesh", default="1x1", help="devices along data x model, or data x model x slots; several with commas"
    )
    options.add_argument(
        "--for",
        default=HERE,
        dest="target",
        help="here, cpu (as many virtual devices as meshes need), v5e, v5p or v6e (also with a topology, v5e:4x4; "
        "needs jax[tpu]), h100 (needs the CUDA plugin of jax)",
    )
    add_bench_options(options)
    options.add_argument("--batch", type=int, default=8, help="rows, of all devices together")
    options.add_argument("--prompt-tokens", type=int, default=4096)
    options.add_argument("--new-tokens", type=int, default=64)
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    options.add_argument("--weights", choices=("int8",), help="linear maps in 8 bits (default: as --dtype)")
    options.add_argument("--implementation", default="auto", help="of kernels: auto, xla, pallas, or pallas,xla")
    options.add_argument("--throughput", action="store_true", help="time steps on a CPU's devices, too")
    options.add_argument("--repeats", type=int, default=5, help="of which the median counts, where steps are timed")
    options.add_argument("--json", type=output_file, help="also write the numbers to this file")
    return finish("bench scale", lambda: run(options.parse_args(argv)))
