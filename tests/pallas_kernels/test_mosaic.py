"""Decode attention in Mosaic GPU: jax's interpreter of its kernels, which looks for races, and what it refuses.

The interpreter runs copies, barriers and warp groups as they are. It has no rule for products whose operands are
transposed, nor for layouts in registers: the kernel multiplies arrays there, and only compilers check these.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from pallas_kernels.common import CAPABILITIES, Unsupported
from pallas_kernels.decode_attention import decode_attention, mosaic_gpu, partials
from pallas_kernels.workloads import Sizes, decode
from tests.kernel_cases.decode_attention import arguments, case
from tests.kernels import Case, Way, check, gpu

POISONED = InterpretGPUParams(detect_races=True, num_tma_threads_per_device=16)
"""What has not been written is not a number; copies may end in any order."""
RAGGED = dataclasses.replace(POISONED, out_of_bounds_reads="uninitialized", uninitialized_memory="zero")
"""Copies give zeros beyond an array's end, as a GPU's do."""


@pytest.mark.parametrize(
    ("some", "stages"),
    [
        (case(1, 1, 16, 520, 64, dtype="bfloat16", scores="sum"), 2),
        (case(2, 1, 3, 72, 64, e=128, dtype="bfloat16", scores="each", alibi=True, window=50, soft_cap=3.0), 1),
        (case(1, 1, 1, 192, 256, dtype="bfloat16", features=4, live="full"), 1),
        (case(1, 1, 9, 64, 192, e=64, dtype="bfloat16", scores="each", live="one"), 1),
        (case(1, 1, 2, 64, 64, dtype="bfloat16", scores="sum", live="none"), 1),
        (case(1, 2, 3, 72, 64, dtype="bfloat16", scores="gumbel"), 1),
        (case(1, 1, 4, 64, 64, dtype="bfloat16", scores="gaussian", alibi=True), 1),
    ],
    ids=str,
)
def test_it_agrees_with_numpy_without_a_race(monkeypatch, some: Case, stages: int):
    inputs = some.arrays[0]
    c, widths = inputs["k"].shape[2], inputs["k"].shape[3] + inputs["v"].shape[3]
    monkeypatch.setattr(mosaic_gpu, "RING", stages * mosaic_gpu.BLOCK * widths * 2)
    check(some, Way("mosaic", RAGGED if c % mosaic_gpu.BLOCK else POISONED))
    assert not interpreter.get_races().races_found


def test_splits_may_end_early():
    for heads, slots, splits, blocks in ((2, 520, 2, 5), (512, 4096, 1, 64), (1, 8, 1, 1)):
        assert partials.splits_of(heads, slots, mosaic_gpu.BLOCK) == splits
        assert partials.split_of(slots, splits, mosaic_gpu.BLOCK) == blocks * mosaic_gpu.BLOCK


def test_interpret_needs_no_parameters():
    some = case(1, 1, 2, 8, 64, dtype="bfloat16")
    check(some, Way("mosaic", True))


@pytest.mark.parametrize(
    ("some", "reason"),
    [
        (case(1, 1, 2, 64, 64), "q, k, v are of float32, and it multiplies bfloat16 alone"),
        (case(1, 1, 2, 64, 64, dtype="bfloat16", bits=(8, 8)), "it has no codes"),
        (case(1, 1, 2, 64, 80, dtype="bfloat16"), "d=80 is not a multiple of 64 up to 256"),
        (case(1, 1, 2, 64, 64, e=320, dtype="bfloat16"), "e=320 is not a multiple of 64 up to 256"),
        (case(1, 1, 2, 100, 64, dtype="bfloat16"), "c=100 slots are not a multiple of 8"),
        (case(1, 1, 17, 64, 64, dtype="bfloat16"), "g=17 query heads share a KV head, more than 16"),
    ],
    ids=str,
)
def test_what_it_lacks_is_refused(some: Case, reason: str):
    with pytest.raises(Unsupported, match=reason):
        decode_attention(**arguments(some), implementation="mosaic", interpret=True)


def lowered(kind: str) -> Any:
    """A decode step's attention, for a GPU of a kind."""
    program = decode("4096 slots", Sizes(32, 8, 4, 4096, 128, jax.numpy.bfloat16))
    with jax.sharding.use_abstract_mesh(gpu(kind)):
        return program.jit("mosaic", "gpu").trace(**program.shapes).lower(lowering_platforms=("cuda",))


def test_it_is_for_hopper():
    a100, h100 = CAPABILITIES
    assert "mosaic_gpu" in lowered(h100).as_text()
    with pytest.raises(Unsupported, match=r"compute capability 9.0 \(Hopper\), and this one's is 8.0"):
        lowered(a100)
