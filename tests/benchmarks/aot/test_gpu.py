"""Kernels compile for GPUs that are not there, whole, and take no more of a multiprocessor than they should."""

from __future__ import annotations

import json
import os
import subprocess

import jax
import pytest

from benchmarks.aot.gpu import fields_of
from benchmarks.aot.gpus import GPUS
from tests.benchmarks.aot.gpu_programs import of_gpu
from tests.paths import ROOT

VARIABLE = "KVJAX_GPU_PYTHON"
"""Names the Python of an environment with jax's CUDA plugin, ptxas and jax-triton."""

MOST_SPILLED = 64
"""Bytes of a thread."""


@pytest.mark.skipif(
    VARIABLE not in os.environ, reason=f"{VARIABLE} names no Python that compiles for CUDA; .ci/run makes one"
)
@pytest.mark.parametrize("chip", ["a100", "h100"])
def test_every_kernel_compiles_for_gpus_without_spilling(chip: str):
    forms = ("pallas", "triton")
    command = [os.environ[VARIABLE], "-W", "ignore", "-m", "tests.benchmarks.aot.gpu_programs", chip, *forms]
    # LLVM makes a readable stack trace of every diagnostic, which takes far longer than compiling.
    quiet = os.environ | {"LLVM_DISABLE_SYMBOLIZATION": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["chip"] for row in rows} == {chip}
    of = {form: [row for row in rows if row["implementation"] == form] for form in forms}
    every = {(program.op, program.label) for program in of_gpu()}
    assert {(row["op"], row["size"]) for row in of["pallas"]} == every
    assert bool(of["triton"]) == (jax.__version_info__ < (0, 12))  # no jax-triton is made for newer ones yet
    for row in rows:
        name = f"{row['op']} {row['size']} as {row['implementation']} for {row['chip']}"
        assert max(row["spills"].values()) <= MOST_SPILLED, f"{name} spills {row['spills']}"
        if row["op"] in ("decode_attention", "paged_attention"):
            assert row["occupancy"][row["op"]] >= 2, f"{name}: one block alone is on a multiprocessor"


@pytest.mark.parametrize(
    ("chip", "threads", "registers", "shared", "blocks"),
    [
        ("a100", 1024, 32, 0, 2),  # threads
        ("h100", 32, 16, 0, 32),  # blocks
        ("h100", 128, 255, 0, 2),  # registers
        ("h100", 128, 96, 39_168, 5),
        ("a100", 128, 96, 39_168, 4),  # shared memory
        ("a100", 128, 32, 166_912, 1),
        ("h100", 1024, 65, 0, 0),
    ],
)
def test_occupancy(chip, threads, registers, shared, blocks):
    assert GPUS[chip].occupancy(threads, registers, shared) == blocks


def test_messages_of_triton_are_read():
    # Fields 1: 300, 2: bytes, 3: 32 bits, 4: 64 bits.
    message = b"\x08\xac\x02" + b"\x12\x03abc" + b"\x1d\x01\x02\x03\x04" + b"\x21" + bytes(8)
    assert fields_of(message) == {1: 300, 2: b"abc", 3: b"\x01\x02\x03\x04", 4: bytes(8)}
