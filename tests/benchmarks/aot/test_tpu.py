"""Kernels compile for accelerators that are not there: every chip's TPU compiler, and lowering to CUDA."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from benchmarks import aot, chip_steps
from benchmarks.aot import page
from benchmarks.aot.bundles import Schedule, read_schedule
from benchmarks.aot.module import read_module
from benchmarks.aot.programs import programs
from benchmarks.aot.tpu import Grid, Kernel, counted, grids_of
from kvjax.models.weights import weight_shapes
from pallas_kernels.benchmark import Program
from pallas_kernels.common import Unsupported
from pallas_kernels.operands import Quantised
from pallas_kernels.workloads import Setup, fused_workload
from tests.cases import slow
from tests.kernels import H100
from tests.paths import ROOT

VARIABLE = "KVJAX_TPU_PYTHON"
"""Names the Python of an environment with `jax[tpu]`."""

ALWAYS = ("v5e", "v6e")
"""Chips for which kernels compile by default; tests of the others are slow."""

V5E = AbstractMesh((1,), ("one",), abstract_device=AbstractDevice("TPU v5 lite", 1, "tpu"))
"""A TPU that is not there, for which kernels are lowered."""

PROGRAMS = list(programs())
OF_TPU, OF_GPU = ([program for program in PROGRAMS if form in program.forms] for form in ("tpu", "gpu"))


@pytest.mark.skipif(
    VARIABLE not in os.environ, reason=f"{VARIABLE} names no Python that has jax[tpu]; .ci/run makes one"
)
@pytest.mark.parametrize("chip", [chip if chip in ALWAYS else slow(chip) for chip in aot.CHIPS])
def test_every_kernel_compiles_for_tpu(chip, tmp_path):
    words = ["-W", "ignore", "-m", "benchmarks.aot", "--chips", chip, "--implementations", "pallas"]
    done = subprocess.run(
        [os.environ[VARIABLE], *words, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = list(json.loads((tmp_path / "chips" / f"{chip}.json").read_text())["kernels"].values())
    assert len(rows) == len(OF_TPU)
    for program in OF_TPU:
        donated = jax.tree.leaves([program.shapes[name] for name in program.in_place])
        row = next(row for row in rows if (row["op"], row["size"]) == (program.op, program.label))
        assert row["alias"] >= sum(x.size * x.dtype.itemsize for x in donated), f"{program} copies what it was given"
        assert row["kernels"] and all(kernel["step"] > 0 for kernel in row["kernels"]), program
        assert row["estimate"] >= sum(kernel["waiting"] for kernel in row["kernels"]), program
    assert f"### Kernels on {chip}" in (tmp_path / "chips.md").read_text()
    of_prompts = {row["size"]: row["kernels"] for row in rows if row["op"] == "prefill_attention"}
    (sums,) = of_prompts["8 heads x 4, 8192 tokens, d 128, bfloat16"]
    (plain,) = of_prompts["the same without scores"]
    assert sums["grid"] == plain["grid"], "attention with sums takes smaller steps than without"


@pytest.mark.parametrize("settings", [{}, {"slopes": True}, {"bits": 8}], ids=str)
@pytest.mark.parametrize("slots", [64, 128, 208])
def test_heads_of_few_slots_with_sinks_lower_to_tpu(slots, settings):
    program = fused_workload("few slots", Setup(2, 8, 1, slots, 128, jnp.bfloat16, **settings), sink_count=4)
    with use_abstract_mesh(V5E):
        lowered = program.jit("pallas", "tpu").trace(**program.shapes).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()


@pytest.mark.skipif(
    VARIABLE not in os.environ, reason=f"{VARIABLE} names no Python that has jax[tpu]; .ci/run makes one"
)
def test_decode_steps_on_tpu_call_the_kernels_and_copy_no_cache():
    command = [os.environ[VARIABLE], "-W", "ignore", "-m", "tests.benchmarks.aot.tpu_steps", "v5e"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    programs = json.loads(done.stdout)
    for name, found in programs["device"].items():
        assert set(found["kernels"]) == set(found["expected"]), name
        assert found["alias"] >= found["cache"], name
        # A few megabytes, however small the cache; on pages the logits and scores of all, less than half a layer.
        share = 0.08 if "paged_attention" in found["expected"] else 0.05
        assert found["temp"] < max(share * found["cache"], 6e6), name
    for name, found in programs["host"].items():
        assert found["host_alias"] >= 8 * found["prompt"], f"{name} copies prompts within host memory"
        assert found["temp"] < 2 * found["prompt"], f"{name} has the prompts of several layers on the device"


def lowered(program: Program, implementation: str) -> jax.stages.Lowered:
    with use_abstract_mesh(H100):
        return program.jit(implementation, "gpu").trace(**program.shapes).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_what_a_gpu_runs_lowers_to_cuda(program):
    assert "stablehlo" in lowered(program, "auto").as_text()


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("program", OF_GPU, ids=str)
def test_gpu_kernels_lower_to_cuda(program):
    assert "triton" in lowered(program, "pallas").as_text()


def test_kernels_without_a_gpu_form_say_so():
    for program in PROGRAMS:
        if "gpu" not in program.forms:
            with pytest.raises(Unsupported, match=r"for tpu|from 16 to 256"):
                lowered(program, "pallas")


def test_an_unknown_chip_is_one_sentence(capsys):
    assert importlib.import_module("benchmarks.aot.__main__").main(["--chips", "v1"]) == 2
    assert "v1 is not one of v4, v5e, v5p, v6e" in capsys.readouterr().err


SCHEDULE = """
= control target key start
LB: loop body
     0   :  { %s1 = inlined_call_operand.hbm [shape: f32[2,8,128], index: 0] }
   0x1   :  { %2 = vsyncpa [#allocation7], 0 } /* Start region 1 */
   0x2 LB: > { %s9 = sphi %s8, %s28 }
   0x3   : > { %394 = sbr.rel (%p101_p4) target = $region40 }
   0x4   : > { %7 = dma.done.wait (%p12_p1), %s39, 26624 /* pipeline-emitter-dma-wait */ }
   0x5   : > { %395 = sbr.rel (%p102_p5) target = $region22 }
   0x6   : > { %v1 = vld [vmem:[%s4] sm:$0xff] }
   0x7   : > { %v2 = vld [vmem:[%s4] sm:$0xff] }
   0x8 PF: > { %v3 = vmatmul.mubr.f32.gmra.mxu0 %v2 } /* Start/End empty region 22 */
   0x9   : > { %9 = dma.done.wait [#allocation9], 128  ;;  %8 = dma.done.wait (%p9_p2), [#allocation4], 128 }
   0xa   : > { %3 = shalt.err (!%p1) /* BoundsCheck 1 for %11 = dma.hbm_to_vmem /*dst_syncflagno=*/[#allocation4]
 hlo: evict.1
 */ }
   0xb   : > { %11 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s5, /*vmem=*/%s6, /*dst_syncflagno=*/[#allocation4] }
   0xc   : > { %12 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s5, /*vmem=*/%s6, /*dst_syncflagno=*/[#allocation4 + $0x1] }
   0xd   : > { %13 = dma.done.wait [#allocation4], 128 }
   0xe   : > { %14 = dma.done.wait [#allocation4 + $0x1], 128 }
   0xf   : > { %15 = dma.vmem_to_hbm [thread:$0]  /*vmem=*/%s6, /*hbm=*/%s5, /*dst_syncflagno=*/[#allocation9] }
  0xf0   : > { %17 = dma.done.wait (%p88_p2), [#allocation9], 128 }
  0x10   : > { %396 = sbr.rel (%p103_p6) target = $region30 }
  0x11   : > { %16 = dma.done.wait [#allocation9], 128 }
  0x12 PF: > { %s5 = sadd.s32 1, %s9 } /* Start/End empty region 30 :: Start/End empty region 40 */
  0x13   : > { %27 = sbr.rel (!%p25_p6) target = $region1 }
  0x14   :  { %v5 = vnop }
"""
"""Of a kernel that jumps at its rows' ends, awaits two copies where they start, and a third later."""


def test_schedules_are_told_by_region():
    assert read_schedule(SCHEDULE) == (3, 16, 3, 0, 2, 1, 0)
    assert read_schedule(SCHEDULE).cycles(steps=10, rows=2) == 3 + 10 * 16 + 2 * 3


def test_a_grid_of_one_step_is_a_step():
    text = "\n".join(line.replace(": > {", ":  {") for line in SCHEDULE.splitlines() if "sbr" not in line)
    schedule = read_schedule(text)
    assert (schedule.once, schedule.step, schedule.copies, schedule.waits) == (0, 18, 3, 2)


def test_products_that_a_mask_may_spare_are_of_every_step():
    lines = SCHEDULE.splitlines()
    product = next(index for index, line in enumerate(lines) if "vmatmul" in line)
    lines[product] = lines[product].replace("vmatmul.mubr.f32.gmra.mxu0", "vadd")
    many = [f"  0x6   : > {{ %v{number} = vmatmul.mubr.f32.gmra.mxu0 %v2 }}" for number in range(40)]
    assert read_schedule("\n".join([*lines[:9], *many, *lines[9:]])).step == 16 + 42


def test_without_products_nothing_is_jumped_over():
    assert read_schedule(SCHEDULE.replace("vmatmul", "vadd"))[:3] == (3, 19, 0)


def test_what_is_no_schedule_is_refused():
    with pytest.raises(ValueError, match="no dump of final bundles"):
        read_schedule("nothing")


MODULE = """
%fused_computation.4 (param_0: f32[8]) -> f32[8] {
  %copy.9 = f32[8]{0} copy(%param_0), metadata={op_name="jit(step)/layer/eviction/scores/mul"}
}
ENTRY %main.21 (p: bf16[64,4096]) -> (f32[64,32,208], s32[64]) {
  %p = bf16[64,4096]{1,0:T(8,128)(2,1)} parameter(0)
  %one = s32[]{:T(128)S(6)} copy(%s), metadata={op_name="state.policy.protection.sinks"}
  %reshape.3 = f32[64,2,64]{2,1,0:T(2,128)} reshape(%p), metadata={op_name="jit(step)/layer/attention/rope/reshape"}
  %slice-start = ((bf16[64,4096]{1,0}), bf16[16,4096]{1,0:S(1)}, s32[]) slice-start(%p), slice={[0:16], [0:4096]}
  %fusion.11 = (f32[64]{0:T(128)S(1)}, bf16[64,4096]{1,0:T(8,128)(2,1)}) fusion(%p, %w), kind=kOutput, calls=%f, \
metadata={op_name="jit(step)/layer/...i,oi->...o/dot_general"}, backend_config={"estimated_cycles":"244112"}
  %copy.72 = bf16[64,32]{1,0} copy(%p), metadata={op_name="jit(step)/layer/...i,oi->...o/dot_general"}, \
backend_config={"window_config":{"estimated_cycles":"4588"}}
  %fusion.4 = bf16[64,32]{1,0} fusion(%p), kind=kLoop, calls=%g, \
metadata={op_name="jit(step)/layer/attention/rope/concatenate"}, backend_config={"estimated_cycles":"28026"}
  %add.1 = f32[64,32]{1,0} fusion(%p), kind=kLoop, calls=%fused_computation.4, backend_config={"estimated_cycles":"7"}
  %gather_fusion = bf16[64,4096]{1,0} fusion(%p), kind=kCustom, calls=%g, metadata={op_name="jit(step)/gather"}
  %scatter_fusion.3 = s32[11]{0:T(128)} fusion(%p), kind=kCustom, calls=%g, \
metadata={op_name="jit(step)/layer/attention/scatter-add"}, \
backend_config={"window_config":{"estimated_cycles":"9223372036854775807","cost_model_type":"COST_MODEL_TYPE_INVALID"}}
  ROOT %evict.2 = (f32[64,32,208]{2,1,0:T(8,128)S(1)}, s32[64]{0}) custom-call(%p), \
custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/layer/eviction/evict/pallas_call"}
}
"""


def test_a_modules_instructions_are_told_with_their_cycles_and_classes():
    found = {each.name: each for each in read_module(MODULE)}
    assert {name: each.cycles for name, each in found.items()} == {
        "reshape.3": 0,
        "fusion.11": 244112,
        "copy.72": 4588,
        "fusion.4": 28026,
        "add.1": 7,
        "gather_fusion": 0,
        "scatter_fusion.3": 0,
        "evict.2": 0,
    }
    classes = {name: chip_steps.class_of(each) for name, each in found.items()}
    assert classes == {
        "reshape.3": "rest",
        "fusion.11": "products",
        "copy.72": "rest",
        "fusion.4": "rest",
        "add.1": "scores",
        "gather_fusion": "rest",
        "scatter_fusion.3": "attention",
        "evict.2": "eviction",
    }
    assert [name for name, each in found.items() if each.kernel] == ["evict.2"]
    unknown = [name for name, each in found.items() if not each.estimated]
    assert unknown == ["reshape.3", "gather_fusion", "scatter_fusion.3", "evict.2"]
    assert found["evict.2"].base == "evict" and found["evict.2"].results == ((64, 32, 208), (64,))


LAYERS = """
%body.1 (q: f32[8]) -> f32[8] {
  %add.9 = f32[8]{0} fusion(%q), kind=kLoop, calls=%g, metadata={op_name="jit(step)/layer/attention/add"}, CYCLES
}
ENTRY %main.3 (e: f32[8], w: f32[8], t: s32[8]) -> f32[8] {
  %e = f32[8]{0} parameter(0), metadata={op_name="decoder.weights.embedding"}
  %w = f32[8]{0} parameter(1), metadata={op_name="decoder.weights.layers[0].mlp.gate.weight"}
  %t = s32[8]{0} parameter(2), metadata={op_name="cache.position"}
  %sum.1 = f32[8]{0} fusion(%e, %t), kind=kLoop, calls=%g, metadata={op_name="jit(step)/layer/reduce_sum"}, CYCLES
  %fusion.1 = (f32[8]{0}, f32[8]{0}) fusion(%sum.1, %w), kind=kLoop, calls=%g, \
metadata={op_name="jit(step)/layer/mul"}, CYCLES
  %half.1 = f32[8]{0} get-tuple-element(%fusion.1), index=1
  %sum.2 = f32[8]{0} fusion(%half.1), kind=kLoop, calls=%g, metadata={op_name="jit(step)/layer/reduce_sum"}, CYCLES
  ROOT %norm.1 = f32[8]{0} fusion(%sum.2), kind=kLoop, calls=%g, metadata={op_name="jit(step)/rsqrt"}, CYCLES
}
""".replace("CYCLES", 'backend_config={"estimated_cycles":"7"}')


def test_what_needs_nothing_of_a_layer_is_there_once():
    found = {each.name: each for each in read_module(LAYERS)}
    assert found["sum.1"].arguments == {"decoder.weights.embedding", "cache.position"}
    step = chip_steps.Step("llama_7b", 64, 204, "h2o")
    times = {name: chip_steps.step_times(each, chip_steps.SHAPES["llama_7b"], step) for name, each in found.items()}
    assert times == {"add.9": 16, "sum.1": 1, "fusion.1": 16, "sum.2": 16, "norm.1": 1}


def test_what_has_no_estimate_takes_the_bundles_of_its_schedule_and_loops_more():
    instructions = read_module(MODULE)
    (moves,) = (each for each in instructions if each.name == "reshape.3")
    again = moves._replace(name="reshape.4")  # the compiler makes one program of both
    schedule = Schedule(once=10, step=4000, rarely=0, inner=0, copies=0, waits=0)
    for loops, known in ((0, True), (129, False)):
        found = counted(again, [*instructions, again], {"reshape.3": schedule._replace(inner=loops)})
        assert (found.name, found.cycles, found.estimated) == ("reshape.4", 4010, known)
    (gather,) = (each for each in instructions if each.name == "gather_fusion")
    assert counted(gather, instructions, {"gather_fusion": schedule}) == gather, "its copies are in no bundle"
    (told,) = (each for each in instructions if each.name == "copy.72")
    assert counted(told, instructions, {"copy.72": schedule}) == told


def test_a_kernel_takes_the_longer_of_cycles_and_traffic_and_waits_for_its_copies():
    chip = aot.SPECIFICATIONS["v4"]
    (instruction,) = (each for each in read_module(MODULE) if each.kernel)
    schedule = Schedule(once=100, step=1000, rarely=50, inner=0, copies=4, waits=2)
    grid = Grid("evict", (4, 8), parallel=False, results=instruction.results, traffic=1228)
    kernel = Kernel(instruction, grid, schedule)
    cycles = 100 + 32 * 1000 + 4 * 50
    assert kernel.cycles(chip) == cycles
    assert kernel.seconds(chip) == pytest.approx(cycles / 1.05e9 + 32 * 2 * 1e-6)
    heavy = Kernel(instruction, grid._replace(traffic=1228 * 10**9), schedule._replace(waits=0))
    assert heavy.seconds(chip) == pytest.approx(1)
    shared = Kernel(instruction, grid._replace(parallel=True), schedule)
    assert shared.cycles(chip) == 100 + 16 * 1000 + 2 * 50
    looped = Kernel(instruction, grid._replace(turns=8), schedule._replace(inner=20))
    assert looped.cycles(chip) == cycles + 4 * 7 * 20


def test_grids_of_kernels_are_found_in_functions_that_a_program_calls():
    program = next(each for each in PROGRAMS if each.op == "decode_attention")
    (grid,) = grids_of(program.jit("pallas", "tpu").trace(**program.shapes).jaxpr)
    assert grid.name == "decode_attention" and grid.sizes[0] == 32
    keys = 2 * 32 * 8 * 4096 * 128 * 2
    assert keys < grid.traffic < 1.1 * keys


def test_a_grid_known_at_run_time_takes_whole_blocks_and_a_step_for_each_result():
    sizes = {
        program.label.split(",")[0]: next(grids_of(program.jit("pallas", "tpu").trace(**program.shapes).jaxpr))
        for program in programs()
        if program.op == "paged_attention" and "d 128, bfloat16" in program.label
    }
    few, many = sizes["32 heads x 1"], sizes["8 heads x 4"]
    assert (few.sizes, few.unknown, few.least) == ((64 * 32,), 0, 64 * 32)
    block = 2 * 16 * 16 * 128 * 2 + 16 * 16 * 4  # 16 pages of keys, values and positions
    per_head = 8 * 128 * 2 + 8 * 128 * 4 + 8 * 4  # queries, and results
    assert few.traffic == few.steps * (block + per_head)
    assert few.part(2) == few  # no head has less than a step
    assert (many.least, many.steps) == (32 * 8, 1024)
    assert many.part(2) == many._replace(sizes=(512,), traffic=many.traffic // 2)
    known = Grid("evict", (4, 8), parallel=False, results=(), traffic=1228)
    assert known.part(2) == known


def test_kernels_say_how_many_turns_their_loops_take():
    program = next(each for each in PROGRAMS if each.op == "prefill_attention")
    (grid,) = grids_of(program.jit("pallas", "tpu").trace(**program.shapes).jaxpr)
    assert (grid.sizes, grid.turns) == ((1, 8, 4, 16, 8), 8)


def _row(compiler: str, **more: object) -> dict[str, object]:
    memory = dict(argument=3_000_000, output=1, alias=0, temp=0, seconds=1.0)
    memory |= dict(loops=0, fusion_cycles=10, fusions=[], unknown=[])
    kernel = dict(name="evict.1", grid=[4, 2], once=29, step=784, rarely=141, inner=0, copies=32, waits=2, cycles=9)
    names = dict(chip="v5e", op="evict", size="tiny", implementation="pallas")
    return names | memory | dict(compiler=compiler, kernels=[kernel], limit=1e-6, estimate=2e-5) | more


def test_rows_are_compiled_once_by_each_compiler(tmp_path, monkeypatch, capsys):
    made: list[str] = []

    def compile_for(chip, program, implementation):
        made.append(f"{program}, {implementation}")
        return _row("") | dict(op=program.op, size=program.label, implementation=implementation)

    main = importlib.import_module("benchmarks.aot.__main__")
    monkeypatch.setattr(main, "compile_for", compile_for)
    monkeypatch.setattr(main, "compiler_name", lambda chip: compiler)
    words = ["--chips", "v5e", "--only", "hamming", "--out", str(tmp_path)]
    compiler = "jax 1 with libtpu 1"
    assert main.main(words) == 0
    first = list(made)
    assert len(first) == len(set(first)) > 2
    assert main.main(words) == 0 and made == first
    assert main.main(["--page", "--out", str(tmp_path)]) == 0 and made == first
    compiler = "jax 2 with libtpu 1"
    assert main.main([*words, "--schedule"]) == 0 and made == 2 * first
    assert "29 + 8 x 784 + 4 x 141; 32 copies awaited where they start, in 2 waits" in capsys.readouterr().out
    page = (tmp_path / "chips.md").read_text()
    assert "29 + 8 x 784 + 4 x 141 | 32 in 2 | 10 | 20.0 | 20.0 |" in page and compiler in page


@pytest.mark.parametrize("turns, text", [({}, "4 x 141 |  | 10 | ≥ 20.0"), ({"turns": 3}, "4 x 155 |  | 10 | 20.0")])
def test_loops_whose_turns_nobody_has_counted_are_marked(turns, text):
    program, row = PROGRAMS[0], _row("jax 1")
    kernel = dict(name="a.1", grid=[4, 2], once=29, step=784, rarely=141, inner=7, copies=0, waits=0, cycles=9) | turns
    row |= dict(op=program.op, size=program.label, bytes=1, kernels=[kernel])
    assert text in page.markdown({"v5e": {"kernels": {"a": row}, "steps": {}}})


def test_a_refusal_is_told_and_keeps_the_others(tmp_path, monkeypatch, capsys):
    def compile_for(chip, program, implementation):
        if implementation == "xla":
            raise RuntimeError("too large")
        return _row("")

    main = importlib.import_module("benchmarks.aot.__main__")
    monkeypatch.setattr(main, "compile_for", compile_for)
    monkeypatch.setattr(main, "compiler_name", lambda chip: "jax 1 with libtpu 1")
    assert main.main(["--chips", "v5e", "--only", "hamming the same", "--out", str(tmp_path)]) == 1
    assert "FAILED: too large" in capsys.readouterr().err
    assert [*json.loads((tmp_path / "chips" / "v5e.json").read_text())["kernels"]] == [
        "hamming the same, 64 bits, pallas"
    ]


def test_an_estimate_past_any_sense_is_refused(tmp_path, monkeypatch, capsys):
    main = importlib.import_module("benchmarks.aot.__main__")
    monkeypatch.setattr(main, "compile_for", lambda *_: _row("", estimate=(2**62) / 1.75e9))
    monkeypatch.setattr(main, "compiler_name", lambda chip: "jax 1 with libtpu 1")
    words = ["--chips", "v5e", "--only", "hamming the same, 64 bits, xla"]
    assert main.main([*words, "--out", str(tmp_path)]) == 2
    assert "the estimate of hamming the same, 64 bits, xla is 2.64e+09 s, and none is over" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.json"))


def test_what_an_implementation_does_not_take_is_left_out(tmp_path, monkeypatch, capsys):
    def compile_for(chip, program, implementation):
        if implementation == "pallas":
            raise Unsupported("d=80 is odd")
        return _row("")

    main = importlib.import_module("benchmarks.aot.__main__")
    monkeypatch.setattr(main, "compile_for", compile_for)
    monkeypatch.setattr(main, "compiler_name", lambda chip: "jax 1 with libtpu 1")
    assert main.main(["--chips", "v5e", "--only", "hamming the same", "--out", str(tmp_path)]) == 0
    assert "v5e hamming the same, 64 bits, pallas is left out: d=80 is odd" in capsys.readouterr().err
    assert [*json.loads((tmp_path / "chips" / "v5e.json").read_text())["kernels"]] == ["hamming the same, 64 bits, xla"]


@pytest.mark.parametrize(
    ("words", "searched"),
    [((), "kernel (and of steps only --steps looks at the names)"), (("--steps",), "kernel or step")],
)
def test_a_name_of_nothing_is_one_sentence(words, searched, tmp_path, monkeypatch, capsys):
    main = importlib.import_module("benchmarks.aot.__main__")
    monkeypatch.setattr(main, "compiler_name", lambda chip: "jax 1 with libtpu 1")
    assert main.main(["--chips", "v5e", "--only", "64 x 204", *words, "--out", str(tmp_path)]) == 2
    assert f"'64 x 204' is in the name of no {searched}; give a part of one, as" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_gpus_have_columns_of_their_own(tmp_path, monkeypatch, capsys):
    def compile_for(chip, program, implementation):
        told = dict(registers={"decode": 168, "sum": 20}, spills={"decode": 64, "sum": 0})
        told |= dict(shared={"decode": 4096, "sum": 0}, occupancy={"decode": 2, "sum": 8})
        row = {name: value for name, value in _row("").items() if name not in ("kernels", "estimate")}
        return row | told | dict(chip=chip, op=program.op, size=program.label, implementation=implementation)

    compiler = types.SimpleNamespace(compile_for=compile_for, ENVIRONMENT={})
    monkeypatch.setitem(sys.modules, "benchmarks.aot.gpu", compiler)
    main = importlib.import_module("benchmarks.aot.__main__")
    monkeypatch.setattr(main, "compiler_name", lambda chip: "jax 1 with jax-cuda12-pjrt 1")
    words = ["--chips", "h100", "--only", "multi-head, 256 slots, rank 8", "--schedule", "--steps"]
    assert main.main([*words, "--out", str(tmp_path)]) == 0
    assert (
        "| decode_attention | multi-head, 256 slots, rank 8 | triton | 282.73 | 84.3 | 168 | 64 | 4,096 | 2 | 1.0 |"
        in (tmp_path / "chips.md").read_text()
    )
    assert "168 registers decode: 64 bytes spilled, 4,096 shared, 2 blocks" in capsys.readouterr().out


def test_rows_of_nobody_are_one_sentence(tmp_path, capsys):
    main = importlib.import_module("benchmarks.aot.__main__").main
    assert main(["--page", "--out", str(tmp_path)]) == 2
    assert "there are no rows in" in capsys.readouterr().err
    (tmp_path / "chips").mkdir()
    (tmp_path / "chips" / "v5e.json").write_text("{")
    assert main(["--page", "--out", str(tmp_path)]) == 2
    assert "is no file of rows" in capsys.readouterr().err


@pytest.mark.parametrize(("model", "millions"), [("llama_8b", 8030), ("qwen3_0_6b", 596), ("gemma3_270m", 268)])
def test_the_models_of_steps_have_as_many_weights_as_real_ones(model, millions):
    weights = weight_shapes(chip_steps.SHAPES[model])
    assert round(sum(leaf.size for leaf in jax.tree.leaves(weights)) / 1e6) == millions


def test_steps_have_what_their_names_say():
    found = list(chip_steps.steps())
    assert len({str(step) for step in found}) == len(found)
    step = next(step for step in found if str(step) == "llama_7b, 64 rows, 204 slots, h2o, int8")
    state = chip_steps.step_state(step)
    layer = state.cache.slots[0]
    assert state.config.layers == 2 and layer.position.shape == (64, 32, 208)
    assert isinstance(layer.kv.k, Quantised) and layer.kv.k.codes.dtype == "int8"
    weights, caches = chip_steps.traffic_of(chip_steps.SHAPES["llama_7b"], step, state)
    assert 12.9e9 < weights < 13.3e9  # twice 6.7 billion, but for the embedding table
    assert 32 * 64 * 32 * 208 * 128 * 2 < caches < 1.1 * 32 * 64 * 32 * 208 * 128 * 2
