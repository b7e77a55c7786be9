"""Kernels compile for accelerators that are not there: every chip's TPU compiler, and lowering to CUDA."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import jax
import pytest

from pallas_kernels import aot
from pallas_kernels.common import Unsupported
from pallas_kernels.programs import programs

VARIABLE = "KVJAX_TPU_PYTHON"
"""Names the Python of an environment with `jax[tpu]`."""

PROGRAMS = list(programs())
OF_TPU, OF_GPU = ([program for program in PROGRAMS if form in program.forms] for form in ("tpu", "gpu"))


@pytest.mark.skipif(
    VARIABLE not in os.environ, reason=f"{VARIABLE} names no Python that has jax[tpu]; .ci/run makes one"
)
@pytest.mark.parametrize("chip", aot.CHIPS)
def test_every_kernel_compiles_for_tpu(chip, tmp_path):
    file = tmp_path / "rows.json"
    words = ["-W", "ignore", "-m", "pallas_kernels.aot", "--chips", chip, "--implementations", "pallas"]
    root = Path(__file__).parent.parent
    command = [os.environ[VARIABLE], *words, "--json", str(file), "--output", str(tmp_path / "table.md")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == len(OF_TPU)
    for program in OF_TPU:
        donated = jax.tree.leaves([program.shapes[name] for name in program.donated])
        row = next(row for row in rows if (row["op"], row["size"]) == (program.op, program.label))
        assert row["alias"] >= sum(x.size * x.dtype.itemsize for x in donated), f"{program} copies what it was given"
    assert f"| {chip} |" in (tmp_path / "table.md").read_text()


@pytest.mark.skipif(
    VARIABLE not in os.environ, reason=f"{VARIABLE} names no Python that has jax[tpu]; .ci/run makes one"
)
def test_decode_steps_on_tpu_call_the_kernels_and_copy_no_cache():
    root = Path(__file__).parent.parent
    command = [os.environ[VARIABLE], "-W", "ignore", "-m", "tests.tpu_steps", "v5e"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for name, found in json.loads(done.stdout).items():
        assert set(found["kernels"]) == set(found["expected"]), name
        assert found["alias"] >= found["cache"], name
        # A few megabytes, however small the cache; on pages the logits and scores of all, less than half a layer.
        share = 0.08 if "paged_attention" in found["expected"] else 0.05
        assert found["temp"] < max(share * found["cache"], 6e6), name


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_what_a_gpu_runs_lowers_to_cuda(program):
    assert "stablehlo" in program.lower("auto", "cuda").as_text()


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("program", OF_GPU, ids=str)
def test_gpu_kernels_lower_to_cuda(program):
    assert "triton" in program.lower("pallas", "cuda").as_text()


def test_kernels_without_a_gpu_form_say_so():
    for program in PROGRAMS:
        if "gpu" not in program.forms:
            with pytest.raises(Unsupported, match="for tpu"):
                program.lower("pallas", "cuda")


def test_an_unknown_chip_is_one_sentence(capsys):
    assert aot.main(["--chips", "v1"]) == 2
    assert "v1 is not one of v4, v5e, v5p, v6e" in capsys.readouterr().err
