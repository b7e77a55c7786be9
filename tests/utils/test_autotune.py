"""Who computes what XLA does, and fastest, wins a shape on a kind of device, once; nothing is raced in programs."""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cli import commands, main
from kvjax.inference import decoder, extend
from kvjax.inference.decoder import settle_step, step_shapes
from kvjax.inference.shapes import state_shapes
from kvjax.model import load
from kvjax.types import Kernels
from kvjax.utils import autotune
from kvjax.utils.autotune import Autotuner
from pallas_kernels import benchmark, common, op
from pallas_kernels.benchmark import Runner, TuningResult
from pallas_kernels.common import Survey, Tuned, TuningTask, bucket_name
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.decode_attention.api import DecodeAttention
from pallas_kernels.fused_decode import one_pass
from pallas_kernels.op import choose
from pallas_kernels.workloads import Setup, decode_workload
from tests.kernel_cases.fused_decode import CASES

DEVICE = "Chip 9"
VERDICT = TuningResult(("triton", "xla"), {"xla": 9.5, "pallas": 3.0, "triton": 2.0}, {"xla": 0.0, "pallas": None})


@pytest.fixture(autouse=True)
def chip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose races have not been run, and where they are kept."""
    monkeypatch.setattr(benchmark, "LEAST", 0.0)
    monkeypatch.setattr(autotune, "tuned_device", lambda: DEVICE)
    monkeypatch.delenv(common.VARIABLE, raising=False)
    monkeypatch.setenv("KVJAX_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / autotune.FILE


def asked(name: str = "op b<=2", *candidates: str) -> TuningTask:
    return TuningTask(name, None, candidates or ("xla", "pallas", "triton"))


def contenders(each: TuningTask) -> TuningResult | None:
    """XLA, which is slow; a kernel that is fast and wrong; one that is fast and right."""
    right = np.array([1.0, -np.inf])

    def slow() -> np.ndarray:
        time.sleep(0.01)
        return right

    starts = {"xla": slow, "pallas": lambda: right + 0.5, "triton": lambda: right + 1e-3}
    return benchmark.benchmark_runners([Runner("op", "b<=2", name, starts[name]) for name in starts], 1e-2)


def test_the_fastest_that_is_right_wins_and_who_is_wrong_is_told(chip, capsys):
    told = r"op b<=2 as 'pallas' differs from 'xla' by 0.5, more than 0.01, and is not used"
    with pytest.warns(UserWarning, match=told):
        tuner = Autotuner(DEVICE)
        found = tuner.settle([asked(), asked("alone b<=1", "xla")], by=contenders)
    (verdict,) = found.values()
    assert verdict.order == ("triton", "xla") and verdict.errors["pallas"] == 0.5
    assert tuner.orders == {"op b<=2": ("triton", "xla")}
    assert "benchmarking kernels on Chip 9, once, for 1 shapes (" in capsys.readouterr().err
    lines = chip.read_text().splitlines()
    assert len(lines) > 10 and '   "op b<=2": {' in lines  # for people, too
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuner.settle([asked()], by=lambda _: pytest.fail("raced twice")) == {}


def test_results_that_are_no_numbers_are_wrong():
    starts = {"xla": lambda: np.zeros(2), "pallas": lambda: np.full(2, np.nan)}
    runners = [Runner("op", "b<=2", name, start) for name, start in starts.items()]
    with pytest.warns(UserWarning, match="'pallas' differs from 'xla' by nan"):
        verdict = benchmark.benchmark_runners(runners, 1e-2)
    assert verdict is not None and verdict.order == ("xla",) and verdict.errors == {"xla": 0.0, "pallas": None}


def test_nothing_is_told_where_the_reference_fails(chip, capsys):
    def fail() -> None:
        raise RuntimeError("out of memory")

    def by(each: TuningTask) -> TuningResult | None:
        starts = {"xla": fail, "pallas": lambda: np.zeros(2)}
        return benchmark.benchmark_runners([Runner("op", "b<=2", name, starts[name]) for name in starts], 1e-2)

    tuner = Autotuner(DEVICE)
    assert tuner.settle([asked()], by=by) == {}
    assert "op b<=2, xla is left out: out of memory" in capsys.readouterr().err
    assert tuner.orders == {"op b<=2": ()} and not chip.exists()


def test_a_verdict_is_used_by_the_next_process(chip):
    autotune.keep(chip, DEVICE, {"op b<=2": VERDICT})
    tuner = Autotuner(DEVICE)
    assert tuner.orders == {"op b<=2": ("triton", "xla")} and not Autotuner("Chip 10").orders
    assert tuner.settle([asked()], by=lambda _: pytest.fail("raced again")) == {}
    assert autotune.read(chip) == {DEVICE: {"op b<=2": VERDICT}}


@pytest.mark.parametrize("name", ["kvjax", "jax"])
def test_another_version_races_again(name, chip, capsys):
    autotune.keep(chip, DEVICE, {"op b<=2": VERDICT})
    chip.write_text(json.dumps(json.loads(chip.read_text()) | {name: "0.0.1"}))
    tuner = Autotuner(DEVICE)
    said = capsys.readouterr().err
    assert f"{name} 0.0.1" in said and "is ignored" in said and said.count("\n") == 1
    assert tuner.settle([asked()], by=lambda _: VERDICT._replace(order=("xla",)))
    assert autotune.read(chip)[DEVICE]["op b<=2"].order == ("xla",)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"kvjax": 1, "jax": 2, "devices": []}', b"\xff", '{"kvjax": "1", "jax": "2", "devices": 3}'],
)
def test_a_broken_file_is_one_sentence(content, chip, capsys):
    chip.parent.mkdir()
    chip.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert autotune.read(chip) == {}
    said = capsys.readouterr().err
    assert said.startswith(f"kvjax: {chip} does not hold tuning results (") and said.count("\n") == 1
    autotune.keep(chip, DEVICE, {"op b<=2": VERDICT})
    assert autotune.read(chip) == {DEVICE: {"op b<=2": VERDICT}}


@pytest.mark.parametrize("order", [["fastest"], "xla", None])
def test_verdicts_of_unknown_implementations_are_refused(order, chip, capsys):
    autotune.keep(chip, DEVICE, {"op b<=2": VERDICT})
    content = json.loads(chip.read_text())
    content["devices"][DEVICE]["op b<=2"]["order"] = order
    chip.write_text(json.dumps(content))
    assert autotune.read(chip) == {} and f"order={order!r}" in capsys.readouterr().err


def test_writers_do_not_lose_each_others_verdicts(chip):
    wanted = {DEVICE: {f"op b<={b}" for b in range(6)}, "Chip 10": {"op b<=1", "op b<=2"}}
    with ThreadPoolExecutor(8) as pool:
        writers = [
            pool.submit(autotune.keep, chip, device, {bucket: VERDICT})
            for device, buckets in wanted.items()
            for bucket in buckets
        ]
        for writer in writers:
            writer.result()
    assert {device: set(found) for device, found in autotune.read(chip).items()} == wanted
    assert [file.name for file in chip.parent.iterdir() if "lock" not in file.name] == [chip.name]


def test_verdicts_live_as_long_as_a_model_where_nothing_can_be_kept(chip, monkeypatch, capsys):
    monkeypatch.setattr(autotune, "write_text", lambda *_: (_ for _ in ()).throw(PermissionError(13, "not yours")))
    tuner = load("tiny").automatic
    assert isinstance(tuner, Autotuner) and tuner.settle([asked()], by=lambda _: VERDICT)
    assert f"{chip} cannot be written (not yours)" in capsys.readouterr().err
    monkeypatch.setenv("KVJAX_CACHE_DIR", "")
    assert tuner.settle([asked("op b<=8")], by=lambda _: VERDICT)
    assert tuner.orders == dict.fromkeys(("op b<=2", "op b<=8"), VERDICT.order)
    assert not chip.exists()


def test_auto_looks_winners_up_and_is_overruled(monkeypatch):
    orders = {"op b<=2": ("pallas", "xla"), "op b<=4": ("triton", "pallas")}
    tuned = Tuned(op.kind_of_device("cpu"), orders)
    two, four, eight = (TuningTask(f"op b<={b}", None) for b in (2, 4, 8))

    def chosen(task: TuningTask | None, implementation: str = tuned, **limits: str | None) -> str:
        limits = limits or {"pallas": None}
        return choose("op", implementation, limits, platform="cpu", interpret=True, task=task)

    assert [chosen(task) for task in (two, four, eight, None)] == ["pallas", "pallas", "xla", "xla"]
    assert chosen(two, "auto") == chosen(two, Tuned("Chip 10", orders)) == "xla"
    assert chosen(two, pallas="c=7 is odd") == "xla" and chosen(two, "xla") == "xla"
    assert choose("op", tuned, {"pallas": None}, platform="gpu", task=two) == "xla"  # none is there
    monkeypatch.setenv(common.VARIABLE, "xla")
    assert chosen(two) == "xla"


def test_races_are_left_out_where_a_variable_decides(monkeypatch):
    def trace(survey: Survey) -> None:
        pytest.fail("surveyed")

    autotune.settle_before(trace, "xla")
    jax.eval_shape(lambda: autotune.settle_before(trace, autotune.automatic()))  # inside a program
    monkeypatch.setenv(common.VARIABLE, "pallas,xla")
    autotune.settle_before(trace, autotune.automatic())
    monkeypatch.delenv(common.VARIABLE)
    monkeypatch.setattr(autotune, "tuned_device", lambda: None)
    autotune.settle_before(trace, autotune.automatic())


def test_races_come_before_a_program_is_traced_and_see_its_shapes(monkeypatch):
    program = decode_workload("tiny", Setup(2, 2, 2, 32, 16, jnp.float32, scores="sum"))
    raced: list[TuningTask] = []

    def by(each: TuningTask) -> TuningResult:
        raced.append(each)
        return VERDICT

    monkeypatch.setattr(Autotuner, "settle", functools.partialmethod(Autotuner.settle, by=by))
    tuner = Autotuner(DEVICE)

    def trace(survey: Survey) -> None:
        run = functools.partial(program.run, implementation=survey, platform="gpu")
        jax.eval_shape(lambda arrays: run(**arrays), program.shapes)

    for _ in range(2):
        autotune.settle_before(trace, tuner)
    (each,) = raced
    assert each.bucket == (
        "decode_attention b<=2 c<=32 h=2 g=2 d=16 e=16 dtype=float32 keys=float32 values=float32 scores=sum"
    )
    assert each.candidates[:2] == ("xla", "pallas")
    assert tuner.orders == {each.bucket: VERDICT.order}
    verdict = benchmark.benchmark_task(each._replace(candidates=("xla",)))  # on random inputs of these shapes
    assert verdict is not None and verdict.errors == {"xla": 0.0} and verdict.order == ("xla",)


def test_prompts_and_steps_are_surveyed_before_they_run(monkeypatch):
    def read(*_: object) -> None:
        raise InterruptedError

    asked: list[str] = []
    monkeypatch.setattr(Autotuner, "settle", lambda _, tasks: asked.extend(each.bucket.split()[0] for each in tasks))
    monkeypatch.setattr(decoder, "read_prompts", read)
    model = load("tiny")
    with pytest.raises(InterruptedError):
        extend.prefill(model, "h2o", [[1, 2, 3]], 16, max_new_tokens=40)
    assert asked == ["prefill_attention"]
    kernels = Kernels(Autotuner(DEVICE))
    state = state_shapes(model, "h2o", 1, 3, 16, max_new_tokens=40, implementation=kernels)
    settle_step(state.decoder, state.cache)
    assert asked == ["prefill_attention", "rope", "evict", "decode_attention"]


def test_a_step_in_one_pass_is_surveyed_beside_the_calls_it_stands_for(monkeypatch):
    survey = Survey()
    kernels = Kernels(survey, False, "tpu")
    state = state_shapes(load("tiny"), "h2o", 1, 3, 16, max_new_tokens=40, implementation=kernels)
    step_shapes(state.decoder, state.cache)
    ops = [(bucket.split()[0], each.candidates) for bucket, each in survey.requests.items()]
    both = ("xla", "pallas")
    first, turning, *others = ops
    assert turning == ("rope", ("xla",))  # heads of 32 channels
    assert [first, *others] == [(op, both) for op in ("prefill_attention", "fused_decode", "evict", "decode_attention")]
    asked = survey.requests[next(bucket for bucket in survey.requests if bucket.startswith("fused_decode"))]
    slots = asked.call.slots
    fits = functools.partial(one_pass, asked.call.query, slots.k, slots.v, platform="tpu")
    lost = Tuned(DEVICE, {asked.bucket: ("xla",)})
    monkeypatch.setattr(op, "kind_of_device", lambda _: DEVICE)
    assert fits()
    assert not fits(implementation=lost)
    assert list(benchmark.program_of(asked).in_place) == ["slots"]  # slots hold nothing else but scores


def test_the_calls_that_a_step_over_codes_stands_for_run():
    survey = Survey()
    step = next(some for some in CASES if some.label == "2x2x2x32x128-none-bits8")
    jax.eval_shape(functools.partial(step.run, implementation=survey, platform="tpu"), *step.arrays)
    assert [bucket.split()[0] for bucket in survey.requests] == ["fused_decode", "evict", "decode_attention"]
    for each in survey.requests.values():
        verdict = benchmark.benchmark_task(each._replace(candidates=("xla",)))
        assert verdict is not None and verdict.order == ("xla",)


def test_random_inputs_tell_right_from_wrong(monkeypatch):
    program = decode_workload("tiny", Setup(1, 2, 2, 32, 16, jnp.float32, scores="sum"))
    survey = Survey()
    jax.eval_shape(lambda arrays: program.run(**arrays, implementation=survey, platform="gpu"), program.shapes)
    (each,) = survey.requests.values()

    class ForgetsABlock(DecodeAttention):
        def __call__(self, implementation=None, **target):
            seen = self.position if implementation == "xla" else self.position.at[:, :, :8].set(-1)
            arguments: dict[str, Any] = vars(self) | {"position": seen}
            return decode_attention(**arguments)

    task = each._replace(call=ForgetsABlock(**vars(each.call)), candidates=("xla", "pallas"))
    with pytest.warns(UserWarning, match="as 'pallas' differs"):
        verdict = benchmark.benchmark_task(task)
    assert verdict is not None and verdict.order == ("xla",)


def test_a_survey_shares_no_program_with_what_runs():
    one, other = Survey(), Survey()
    assert one == one and one != other and one != "xla" and one not in {"xla", other}
    assert choose("op", one, {"pallas": None}, platform="gpu", task=TuningTask("op", None)) == "xla"
    assert one.requests["op"].candidates == ("xla", "pallas") and not other.requests
    choose("op", one, {"pallas": "c=7 is odd"}, platform="gpu", task=TuningTask("op", None))
    assert one.requests["op"].candidates == ("xla", "pallas")
    choose("op", one, {"pallas": "c=7 is odd"}, platform="gpu", task=TuningTask("other", None))
    assert one.requests["other"].candidates == ("xla",)
    choose("op", one, {"pallas": None}, platform="gpu", task=TuningTask("other", None))
    assert one.requests["other"].candidates == ("xla", "pallas")


def test_buckets_round_what_grows_and_tell_the_rest_exactly():
    assert bucket_name("op", {"b": 3, "c": 4096}, {"h": 8, "window": None, "keep": False, "sums": True, "rank": 0}) == (
        "op b<=4 c<=4096 h=8 sums rank=0"
    )
    assert bucket_name("op", {"b": 1, "c": 0}, {}) == "op b<=1 c<=1"


@pytest.mark.parametrize(
    ("platform", "kind", "said", "decided"),
    [
        ("cpu", "cpu", "on", False),
        ("gpu", "NVIDIA H100 80GB HBM3", "on", True),
        ("gpu", "NVIDIA H100 80GB HBM3", "", True),
        ("gpu", "NVIDIA H100 80GB HBM3", "off", False),
        ("tpu", "TPU v5 lite", "on", False),
        ("tpu", "TPU7x", "on", True),
    ],
)
def test_races_decide_on_gpu_and_on_unlisted_tpus(platform, kind, said, decided, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv(autotune.VARIABLE, said)
    monkeypatch.setattr(op, "platform_of", lambda _: platform)
    monkeypatch.setattr(op, "kind_of_device", lambda _: kind)
    assert autotune.tuned_device() == (kind if decided else None)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert autotune.tuned_device() is None
    monkeypatch.setenv(autotune.VARIABLE, "maybe")
    with pytest.raises(ValueError, match="KVJAX_TUNE=maybe is neither on nor off"):
        autotune.tuned_device()


def test_the_command_says_why_there_is_nothing_to_race(monkeypatch, capsys):
    monkeypatch.undo()
    assert main.main(["tune", "--policy", "h2o", "--budget", "64"]) == 2
    said = capsys.readouterr()
    assert said.err == (
        "kvjax tune: there is nothing to benchmark on cpu, where each operation has one implementation; run it on a "
        "machine with a GPU, or add --show.\n"
    )
    assert said.out == ""
    assert main.main(["tune", "--batch", "0"]) == 2
    assert "--batch=0 is not a whole number from 1" in capsys.readouterr().err
    for platform, kind, said in (
        ("tpu", "TPU v4", "kernels on TPU v4 are chosen by its compiler's schedules, without benchmarks"),
        ("gpu", "NVIDIA A100", "KVJAX_TUNE=off disables benchmarks; unset it."),
    ):
        monkeypatch.setattr(op, "platform_of", lambda _, platform=platform: platform)
        monkeypatch.setattr(op, "kind_of_device", lambda _, kind=kind: kind)
        assert main.main(["tune"]) == 2
        assert said in capsys.readouterr().err


def test_the_command_shows_what_is_kept(chip, monkeypatch, capsys):
    assert main.main(["tune", "--show"]) == 0
    assert capsys.readouterr().out == f"There are no tuning results: none are in {chip}.\n"
    autotune.keep(chip, DEVICE, {"evict b<=2 h=8": VERDICT})
    assert main.main(["tune", "--show"]) == 0
    out = capsys.readouterr().out
    assert str(chip) in out and DEVICE in out
    (row,) = (line for line in out.splitlines() if "evict" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "evict",
        "b<=2 h=8",
        "9.5",
        "3.0",
        "2.0",
        "NaN",
        "triton",
    ]
    monkeypatch.setenv("KVJAX_CACHE_DIR", "")
    assert main.main(["tune", "--show"]) == 0
    assert "KVJAX_CACHE_DIR is empty, so that none are kept" in capsys.readouterr().out


def test_the_command_races_all_shapes_of_a_model(monkeypatch, capsys):
    def candidates(self: Survey, task: TuningTask, found: tuple[str, ...]) -> None:
        note(self, task, ("xla",) if task.bucket.startswith("evict") else ("xla", "triton"))

    note = Survey.note
    monkeypatch.setattr(Survey, "note", candidates)
    monkeypatch.setattr(Autotuner, "settle", functools.partialmethod(Autotuner.settle, by=lambda _: VERDICT))
    words = "--policy h2o --budget 32 --batch 1 4 --prompt-length 40 --max-new-tokens 8"
    assert main.main(["tune", *words.split()]) == 0
    rows: list[list[str]] = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()
    ]
    told = [(row[0], row[1].split()[0], row[-1]) for row in rows if row and row[0]]
    steps = [("rope", "triton"), ("evict", "xla, alone"), ("decode_attention", "triton")]
    expected = [("prefill_attention", "triton"), *steps]
    assert told == [(op, f"b<={batch}", winner) for batch in (1, 4) for op, winner in expected]


def test_kernels_stands_in_for_the_variable(monkeypatch, capsys):
    monkeypatch.setenv(common.VARIABLE, "auto")
    options = argparse.ArgumentParser(prog="kvjax test")
    commands.add_model_options(options)
    options.parse_args(["--kernels", "pallas,xla"])
    assert os.environ[common.VARIABLE] == "pallas,xla"
    with pytest.raises(SystemExit, match="2"):
        options.parse_args(["--kernels", "fast"])
    assert "argument --kernels: fast is not one of auto, xla, pallas, triton" in capsys.readouterr().err
