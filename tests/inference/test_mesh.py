"""Programs on meshes of devices give what one device gives, and send little."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import parts
from kvjax.cli import evaluate
from kvjax.models.sharding import parse_mesh
from tests.cases import PAIRS, POLICIES, core, slow
from tests.compiling import fast_environment
from tests.paths import ROOT
from tests.small_models import MODELS

MESHES = ((1, 1), (2, 1), (1, 4), (2, 4), (1, 8))


Told = dict[str, Any]
"""What tests.mesh_runs is to do."""


def run(*told: Told) -> list[dict[str, Any]]:
    """What tests.mesh_runs prints, in one process."""
    words = [sys.executable, "-m", "tests.mesh_runs", json.dumps(told)]
    on_cpu = os.environ | {"JAX_PLATFORMS": "cpu"}  # of which there are eight, also beside a GPU
    done = subprocess.run(words, cwd=ROOT, env=on_cpu, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def compared(cases: list[str], kv_heads: int, *meshes: tuple[int, ...], model: str | None = None) -> Told:
    return dict(what="compared", cases=cases, kv_heads=kv_heads, meshes=meshes, model=model)


def groups(names: list[str], size: int) -> list[list[str]]:
    return [names[i : i + size] for i in range(0, len(names), size)]


EVERYTHING = [slow([compared(names, n, *MESHES)]) for n in (1, 2, 8) for names in groups(list(POLICIES | PAIRS), 10)]


@pytest.mark.parametrize(
    "told",
    [
        # Rows on two devices, heads on two, three on each, and the slots of each on two.
        core([compared(["h2o"], 6, (2, 4))]),
        [compared(["keyformer", "tova", "lsh_e"], 6, (2, 4))],
        [compared(["less-performer", "fastgen", "lightkv", "momentkv+h2o"], 6, (2, 4))],
        *(slow([compared(names, 6, (2, 4))]) for names in groups(list(POLICIES | PAIRS), 10)),
        [
            compared(["less+h2o+int4", "lightkv-offload"], 1, (1, 4)),
            # Pages of many heads, whose budgets tie.
            compared(["random+adakv"], 8, (1, 4)),
            # Slots alone, whatever the number of heads.
            compared(["h2o"], 2, (2, 1, 4)),
            compared(["lsh_e"], 2, (1, 2, 2)),
            compared(["keydiff-cache-positions"], 2, (1, 1, 2)),
        ],
        slow([compared(["h2o+topk"], 1, (1, 4))]),
        slow([compared(["h2o", "streaming", "less-performer", "lsh_e", "momentkv+h2o"], 2, (2, 1, 4), (1, 2, 2))]),
        *(slow([compared(names, 2, (1, 1, 4))]) for names in groups(list(POLICIES | PAIRS), 10)),
        [
            compared(["streaming", "h2o+adakv"], 2, (1, 4), model="SLOPED"),
            compared(["tova"], 2, (2, 2), model="LOCAL"),
            compared(["h2o"], 2, (2, 4), model="SOURCES"),
            # Experts: one on each device, with and without slots of their own.
            compared(["fastgen"], 2, (2, 4), model="MIXED"),
            compared(["h2o"], 2, (1, 8), model="LLAMA4"),
            compared(["h2o"], 2, (2, 4), model="WIDE_NORMS"),
            compared(["less-performer"], 2, (2, 4), model="SINKS"),
            # Key heads of recurrent layers on two devices.
            compared(["h2o"], 2, (2, 4), model="HYBRID"),
        ],
        slow(
            [
                compared(["h2o", "less-performer", "fastgen"], 2, (1, 8), (2, 4), model="MIXED"),
                compared(["streaming"], 2, (1, 4), model="GROWING"),
                compared(["h2o"], 2, (2, 4), (1, 2), model="WIDTHS"),
                compared(["keyformer"], 2, (1, 2), model="LEARNED"),
                compared(["h2o", "less-performer", "fastgen"], 2, (1, 8), (2, 4), model="LLAMA4"),
                compared(["h2o", "less-performer", "fastgen"], 2, (2, 4), model="SINKS"),
                compared(["h2o", "fastgen"], 2, (2, 2), (2, 1, 4), model="HYBRID"),
            ]
        ),
        *EVERYTHING,
    ],
)
def test_a_mesh_gives_what_one_device_gives(told: list[Told]) -> None:
    found = run(*told)
    assert len(found) == sum(len(each["cases"]) * len(each["meshes"]) for each in told)
    wrong = [row for row in found if not row["same"] or row["off"] > 1e-9 or row["programs"] > 1]
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("names", groups(list(MODELS), 5), ids=", ".join)
def test_every_model_on_a_mesh_gives_what_it_gives_on_one_device(names: list[str]) -> None:
    test_a_mesh_gives_what_one_device_gives([compared(["h2o"], 2, (2, 4), model=name) for name in names])


def test_rows_with_slots_of_their_own_come_and_go() -> None:
    (row,) = run(dict(what="rows", cases=["fastgen"], kv_heads=2, meshes=[(2, 4)]))
    assert row["same"] and row["off"] < 1e-9


def test_a_step_sends_little() -> None:
    """Two a layer and one for the table; where slots are shared one more for all victims, with heads one a layer.

    One more where pairs that have left are told or slots are counted.
    """
    layers = 2
    found = run(
        dict(what="collectives", cases=["h2o", "tova", "fastgen"], kv_heads=4, meshes=[(2, 2)]),
        dict(what="collectives", cases=["h2o", "keyformer"], kv_heads=1, meshes=[(1, 4)]),
        dict(what="collectives", cases=["h2o"], kv_heads=4, meshes=[(1, 1, 4)]),
        dict(what="collectives", cases=["h2o"], kv_heads=2, meshes=[(1, 4)]),
        dict(what="collectives", cases=["streaming", "less-performer"], kv_heads=2, meshes=[(1, 1, 4)]),
        dict(what="collectives", cases=["lsh_e"], kv_heads=2, meshes=[(1, 1, 4)]),
        dict(what="collectives", cases=["h2o", "tova"], kv_heads=2, meshes=[(2, 2)], model="MIXED"),
        dict(what="collectives", cases=["h2o"], kv_heads=2, meshes=[(2, 2)], model="SHARED"),
        dict(what="collectives", cases=["h2o"], kv_heads=2, meshes=[(2, 2)], model="WIDE_NORMS"),
    )
    sent, mixed, normed = found[:10], found[10:13], found[13:]
    assert all(row["calls"] <= 2 * layers + 1 and row["gathered"] == 0 for row in mixed), mixed
    assert all(row["calls"] <= 3 * layers + 1 and row["gathered"] == 0 for row in normed), normed
    heads, slots, both, more, hashes = sent[:3], sent[3:6], sent[6:7], sent[7:9], sent[9:]
    assert all(row["calls"] <= 2 * layers + 1 and row["gathered"] == 0 for row in heads), heads
    assert all(row["calls"] <= 2 * layers + 2 and row["gathered"] < row["keys"] / 2 for row in slots), slots
    assert all(row["calls"] <= 3 * layers + 2 and row["gathered"] < row["keys"] / 2 for row in both), both
    assert all(row["calls"] <= 2 * layers + 3 and row["gathered"] < row["keys"] / 2 for row in more), more
    assert all(row["calls"] <= 3 * layers + 1 and row["gathered"] < row["keys"] / 2 for row in hashes), hashes
    # Prompts are shared by queries where steps are by slots.
    read = [(row["queries"], row["tokens"]) for row in sent[:9]]
    assert read == [(64, 64)] * 3 + [(16, 64)] * 3 + [(32, 64)] + [(16, 64)] * 2


def test_a_report_says_the_same_on_a_mesh() -> None:
    alone, several = run(dict(what="reported", cases=["long"], kv_heads=1, meshes=[(1, 2)]))
    assert alone.keys() == several.keys() and all(several[name] == pytest.approx(alone[name]) for name in alone)


@pytest.mark.parametrize("report", evaluate.REPORTS)
def test_every_report_takes_a_mesh(report: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fox.txt").write_text("A fox. " * 20)
    words = [report, "--text", str(tmp_path / "fox.txt"), "--out", str(tmp_path), "--mesh", "model=9999"]
    assert evaluate.main(words) == 2
    assert "--mesh model=9999 asks for 9999 devices" in capsys.readouterr().err


def served(cases: list[str], kv_heads: int, *meshes: tuple[int, int]) -> Told:
    return dict(what="served", cases=cases, kv_heads=kv_heads, meshes=meshes)


SERVED = ("full", "streaming", "snapkv", "lightkv", "less", "keyformer", "tova", "random")


@pytest.mark.parametrize(
    "told",
    [
        [served(["own"], 2, (1, 1), (2, 2)), served(["own"], 1, (1, 4)), served(["own drafts"], 2, (2, 2))],
        slow([served(["streaming drafts"], 2, (1, 4)), served(["keyformer drafts"], 1, (2, 4))]),
        *(slow([served([name], 2, (2, 2), (1, 4)), served([name], 1, (2, 4))]) for name in ("h2o", *SERVED)),
    ],
)
def test_a_server_on_a_mesh_answers_as_on_one_device(told: list[Told]) -> None:
    found = run(*told)
    assert len(found) == sum(len(each["cases"]) * len(each["meshes"]) for each in told)
    for row in found:
        assert row["same"] and row["off"] < 1e-9 and row["compiled"] == row["failed_dispatches_total"] == 0, row
        assert row["reused"] == 48, row
        if row["case"].startswith("own"):  # which remembers little of heads as wholes
            (data, model), seen = row["mesh"], row["snapshot_bytes"] / 100
            assert row["cache_device_bytes"] < 1.1 * row["cache_bytes"] / (data * model), row
            assert row["snapshot_device_bytes"] < row["snapshot_bytes"] / model + seen, row


def test_drafts_on_a_mesh_write_the_full_caches_texts() -> None:
    meshes = [2, 2], [1, 4], [2, 2, 2]
    told = dict[str, Any](what="lossless", kv_heads=2)
    rows = run(told | dict(cases=["h2o"], meshes=meshes), told | dict(cases=["tova refreshed"], meshes=meshes[2:]))
    assert len(rows) == len(meshes) + 1
    for row in rows:
        assert row["same"] and 1 < row["per_round"] <= 4, row


def test_a_command_of_one_device_refuses_a_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parts.main(["--mesh", "model=2"])
    assert "model=2 asks for several devices, but this command runs on one" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["rows=2", "data=0", "data=2,data=2", "model", "", "model=9999"])
def test_a_mesh_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"--mesh {text}"):
        parse_mesh(text)


Generate = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def generate() -> Iterator[Generate]:
    """Starts one process of two that write a text, or the only one; none outlives the test."""
    with contextlib.ExitStack() as processes:

        def start(
            number: int | None, port: int = 0, new: int = 12, told: tuple[str, ...] = ("--json",)
        ) -> subprocess.Popen[str]:
            words = ["generate", "--prompt", "Once upon a time", "--policy", "h2o", "--budget", "16", *told]
            words += ["--temperature", "0", "--ignore-eos", "--max-new-tokens", str(new)]
            if number is not None:
                words += ["--mesh", "data=2,model=4", "--distributed", f"127.0.0.1:{port},2,{number}"]
            process = subprocess.Popen(
                [sys.executable, "-m", "kvjax", *words],
                cwd=ROOT,
                env=os.environ | fast_environment() | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            processes.enter_context(process)  # which closes its pipes and waits
            processes.callback(process.kill)
            return process

        yield start


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_two_processes_write_what_one_does(generate: Generate) -> None:
    port = free_port()
    alone, first, second = generate(None), generate(0, port), generate(1, port)
    told, both, nothing = (process.communicate(timeout=600)[0] for process in (alone, first, second))
    assert [process.returncode for process in (alone, first, second)] == [0, 0, 0]
    assert json.loads(both)["text"] == json.loads(told)["text"] and not nothing


def test_a_process_that_is_gone_ends_the_others(generate: Generate) -> None:
    port = free_port()
    first, second = (generate(number, port, new=900, told=()) for number in (0, 1))
    assert first.stdout is not None and first.stdout.read(1)  # it writes
    second.kill()
    said = first.communicate(timeout=200)[1]
    second.communicate()
    assert first.returncode == 2
    assert "another process of this run has stopped" in said.splitlines()[-1] and "Traceback" not in said
