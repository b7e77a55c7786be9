"""Benchmark the kernels of `pallas_kernels`, or with `--step` a whole decode step."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from kvjax.cli.commands import Parser, finish
from kvjax.evaluation import bench
from kvjax.methods import policy
from kvjax.methods.less.feature_maps import init_kernels
from kvjax.utils.files import output_file, write_text
from kvjax.utils.settings import whole_number
from pallas_kernels import workloads
from pallas_kernels.benchmark import Runner, run_in_turn, runner_of
from pallas_kernels.common import IMPLEMENTATIONS, Unsupported
from pallas_kernels.workloads import Setup, Workload

OPS = ("decode", "paged", "evict", "step", "hamming", "prefill", "rotate", "less")
COPY, JAX = "copy", "jax.nn"
PAGE = 32
"""Slots per page."""

LARGE = dict(batch=32, slots=4096, kv_heads=8, groups=4, head_width=128, prompt_tokens=8192, dtype="bfloat16")
SMALL = dict(batch=2, slots=1024, kv_heads=4, groups=4, head_width=64, prompt_tokens=1024, dtype="float32")
LARGE |= dict(step_batch=64, step_slots=204)
SMALL |= dict(step_batch=4, step_slots=64)
"""Default sizes with an accelerator (`LARGE`) and without one (`SMALL`)."""


def ways(program: Workload) -> Iterator[Runner]:
    """Yield each implementation that runs here."""
    arrays = program.arrays()
    for name in IMPLEMENTATIONS[1:]:
        try:
            program.jit(name).trace(**arrays)
        except Unsupported:
            continue
        yield dataclasses.replace(runner_of(program, name, arrays), bytes=program.bytes)


def peers(program: Workload, causal: bool) -> Iterator[Runner]:
    """Yield the attention of other libraries over the same keys and values, each in the layout that it needs.

    They return no scores and take no mask of slots.
    """
    arrays = program.arrays()
    q, k, v = (arrays[name] for name in "qkv")
    b, h, g, d = q.shape[0], q.shape[1], q.shape[2], q.shape[-1]
    q = jnp.swapaxes(q.reshape(b, h * g, -1, d), 1, 2)  # [b t heads d]
    k, v = (jnp.swapaxes(x, 1, 2) for x in (k, v))
    size = sum(x.size * x.dtype.itemsize for x in (q, q, k, v))
    for name in ("xla", "cudnn") if jax.default_backend() == "gpu" else ("xla",):
        run = jax.jit(lambda *x, name=name: jax.nn.dot_product_attention(*x, is_causal=causal, implementation=name))
        label = JAX if name == "xla" else f"{JAX} {name}"
        call = functools.partial(run, q, k, v)
        yield Runner(program.op, program.label, label, call, compared=False, bytes=size)
    if importlib.util.find_spec("torch") is not None and jax.default_backend() in ("gpu", "cpu"):
        yield from _torch(program, causal, size)


def _torch(program: Workload, causal: bool, size: int) -> Iterator[Runner]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if (device == "cuda") != (jax.default_backend() == "gpu"):
        return
    dtype = getattr(torch, program.shapes["q"].dtype.name)
    b, h, g = program.shapes["q"].shape[:3]
    q, k, v = (torch.randn(program.shapes[name].shape, dtype=dtype, device=device) for name in "qkv")
    q = q.reshape(b, h * g, -1, q.shape[-1])

    def start() -> torch.Tensor:
        with torch.inference_mode():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=g > 1)

    def wait(_: torch.Tensor) -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    yield Runner(program.op, program.label, "torch", start, wait, compared=False, bytes=size)


def copy(size: int) -> Runner:
    """Return a copy within the device that moves `size` bytes, half of them read and half written."""
    x = jnp.ones(max(1, size // 2) // 4, jnp.float32)
    run = jax.jit(lambda x: x + 1)
    return Runner(COPY, f"{size / 1e6:,.0f} MB", COPY, lambda: run(x), compared=False, bytes=2 * x.nbytes)


def programs(options: argparse.Namespace) -> Iterator[tuple[str, str, Workload]]:
    """Yield the operation, the title of its table and a program for each benchmark."""
    b, c, h, g, d = (options.batch, options.slots, options.kv_heads, options.groups, options.head_width)
    n, dtype, heads = options.prompt_tokens, jnp.dtype(options.dtype), f"{options.kv_heads} x {options.groups} heads"
    size = f"{b} rows, {c} slots, {heads}, d {d}, {dtype.name}"
    sizes, pages = Setup(b, h, g, c, d, dtype), b * h * c // PAGE
    summed, noisy, prompt = sizes._replace(scores="sum"), sizes._replace(noisy=True), sizes._replace(b=1, c=n)
    for label, variant, rank in (
        ("plain", sizes, 0),
        ("sum of probabilities", summed, 0),
        ("Gumbel scores", noisy, 0),
        ("rank 8", sizes, 8),
        ("Gumbel scores, rank 8", noisy, 8),
    ):
        yield "decode", f"decode_attention: {size}", workloads.decode_workload(label, variant, rank=rank)
    program = workloads.paged_workload(f"{pages} pages of {PAGE}", b, h, g, pages, PAGE, d, dtype)
    yield "paged", f"paged_attention: {size}", program
    yield "evict", f"evict: {size}", workloads.evict_workload("a pair and its score", b, h, c, d, dtype)
    yield "step", f"fused_decode: {size}", workloads.fused_workload("sums", summed)
    yield "hamming", f"hamming: {size}", workloads.hamming_workload("16 bits", b, h, g, c, 16)
    title = f"prefill_attention: 1 row, {n} tokens, {heads}, d {d}, {dtype.name}"
    yield "prefill", title, workloads.prefill_workload("plain", prompt, scores=False)
    yield "prefill", title, workloads.prefill_workload("column sums", prompt)
    yield "prefill", title, workloads.prefill_workload("Gumbel column sums", prompt, "noise")
    title = f"rope: {b} rows, {heads}, d {d}, {dtype.name}"
    yield "rotate", title, workloads.rope_workload("one token", b, h, g, d, dtype)
    for which, rows, tokens in (("phi", b, 1), ("psi", b, 1), ("psi", 1, n)):
        program = workloads.feature_workload(which, f"rows x tokens {rows} x {tokens}", rows, h, g, tokens, d, dtype)
        yield "less", f"less_memory: {heads}, d {d}, {dtype.name}", program


def groups(options: argparse.Namespace) -> Iterator[tuple[str, list[Runner]]]:
    """Yield the title and runners of each table, the copy first."""
    cases = list(programs(options))
    for (op, title), of_op in itertools.groupby(cases, key=lambda case: case[:2]):
        if op in options.ops.split(","):
            runners = [copy(cases[0][2].bytes)]
            for _, _, program in of_op:
                runners += [*ways(program), *(peers(program, op == "prefill") if program.label == "plain" else ())]
            yield title, runners


def print_kernel_timings(title: str, runners: list[Runner]) -> list[dict[str, Any]]:
    """Print and return the medians, with bandwidth relative to the copy and times relative to the peers."""
    shown = Table(title=title)
    for heading in ("inputs", "implementation", "ms", "GB/s", "of copy", "time / xla", f"/ {JAX}", "/ torch", "error"):
        shown.add_column(heading, justify="left" if heading in ("inputs", "implementation") else "right")
    bandwidth = next(r.bytes / r.median for r in runners if r.op == COPY)
    plain = {r.name: r.median for r in runners if r.label == "plain"}
    rows = []
    for r in runners:
        same = {runner.name: runner.median for runner in runners if (runner.op, runner.label) == (r.op, r.label)}
        times = {"xla": same.get("xla"), JAX: plain.get(JAX), "torch": plain.get("torch")}
        over = {name: r.median / seconds for name, seconds in times.items() if seconds is not None and r.op != COPY}
        row: dict[str, Any] = dict(
            op=r.op,
            inputs=r.label,
            implementation=r.name,
            milliseconds=1e3 * r.median,
            bytes=r.bytes,
            bytes_per_second=r.bytes / r.median,
            share_of_copy=r.bytes / r.median / bandwidth,
            error=r.error,
            time_over=over,
        )
        rows.append(row)
        cells = [f"{over[name]:.2f}" if name in over else "" for name in times]
        shown.add_row(
            r.label, r.name, f"{1e3 * r.median:.3f}", f"{r.bytes / r.median / 1e9:,.1f}",
            f"{row['share_of_copy']:.0%}", *cells, "" if r.name == "xla" or r.error is None else f"{r.error:.0e}",
        )  # fmt: skip
    Console(width=120).print(shown)
    return rows


def time_decode_steps(options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Time decode steps of a whole model on a filled cache, with and without LESS."""
    config = bench.SHAPES[options.step_model]
    model, steps = bench.random_model(config, options.dtype), 16
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, config.vocab_size, (options.step_batch, options.step_slots))
    kernels = init_kernels(jax.random.key(1), config)
    contenders = []
    for base in ("streaming", "h2o"):
        for name, candidate in ((base, policy(base)), (f"less on {base}", policy("less", base=base, kernels=kernels))):
            contender = bench.decoder(model, candidate, options.step_slots, tokens, steps)
            contenders.append(dataclasses.replace(contender, name=name))
    bench.race(contenders, options.repeats)
    title = (
        f"{steps} steps: {model.name}, {options.step_batch} rows, {options.step_slots} slots, {options.dtype}; {device}"
    )
    return {"title": title, "rows": bench.print_timings(contenders, options.step_batch * steps, title)}


def run(options: argparse.Namespace) -> None:
    """Run the benchmarks that the command line names, and print and write their tables."""
    tables: list[dict[str, Any]] = []
    for name in options.ops.split(","):
        if name not in OPS:
            raise ValueError(f"there is no operation {name!r} to benchmark; choose from {', '.join(OPS)}.")
    for name in ("repeats", *(name for name in LARGE if name != "dtype")):
        whole_number(f"--{name.replace('_', '-')}", getattr(options, name))
    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}, medians of {options.repeats}"
    if options.step:
        tables.append(time_decode_steps(options, device))
    else:
        for title, runners in groups(options):
            title = f"{title}; {device}"
            tables.append({"title": title, "rows": print_kernel_timings(title, run_in_turn(runners, options.repeats))})
    if options.json:
        write_text(options.json, json.dumps({"tables": tables}, indent=1))


def parser() -> Parser:
    """Build the command line's parser; the default sizes depend on JAX's devices."""
    sizes = SMALL if jax.default_backend() == "cpu" else LARGE
    options = Parser(prog="kvjax bench kernels", description=__doc__)
    options.add_argument("--ops", default=",".join(OPS), help="operations, separated by commas")
    options.add_argument("--step", action="store_true", help="time whole decode steps with and without LESS")
    options.add_argument(
        "--step-model", choices=("toy", "synthetic", "llama_7b"), default="toy" if sizes is SMALL else "llama_7b"
    )
    options.add_argument("--repeats", type=int, default=5, help="number of runs; the median is reported")
    options.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default=sizes["dtype"], help="dtype of the inputs"
    )
    for name, value in sizes.items():
        if name != "dtype":
            options.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help="a size, from 1")
    options.add_argument("--json", type=output_file, help="also write the numbers to this file")
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return finish("bench kernels", lambda: run(parser().parse_args(argv)))
