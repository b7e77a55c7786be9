"""States from shapes alone, and what compilers say of steps on many devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from benchmarks import deployments, scale
from benchmarks.deployments import FEW, MORE, Deployment, Variant
from benchmarks.footprint import collectives
from benchmarks.models import SHAPES, config_named
from benchmarks.targets import MEMORY, mesh_shape
from kvjax.cli import bench
from kvjax.evaluation.bench import shaped_model
from kvjax.inference import prefill
from kvjax.inference.shapes import state_shapes
from kvjax.models.linear import signed
from kvjax.models.weights import rounded_shapes, weight_shapes
from tests.benchmarks.aot.test_tpu import VARIABLE
from tests.paths import ROOT
from tests.small_models import GQA, random_model


def described(tree):
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


KVZIP = kvjax.policy("kvzip", prompt=(1, 2), later=(3,), normalized=True, recent=2, plan="uniform")


@pytest.mark.parametrize("policy", ["full", "h2o", "criticalkv", KVZIP])
def test_a_state_of_shapes_is_that_of_a_prompt(policy, monkeypatch):
    model, prompts = random_model(GQA), np.ones((2, 12), int)
    wanted, _ = kvjax.prefill(model, policy, prompts, 1.0 if policy == "full" else 8, max_new_tokens=4)
    shaped = shaped_model(GQA, "float32", None, None)
    shaped.name = model.name  # states know the model that they are of
    for deep in (prefill.DEEP, 1):  # in one program, and layer by layer
        monkeypatch.setattr(prefill, "DEEP", deep)
        found = state_shapes(shaped, policy, 2, 12, 1.0 if policy == "full" else 8, max_new_tokens=4)
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        assert described(found) == described(wanted)


def test_slots_that_a_prompt_decides_have_no_shape():
    shaped = shaped_model(GQA, "float32", None, None)
    with pytest.raises(ValueError, match="snapkv gives each head slots of its own once it has read a prompt"):
        state_shapes(shaped, "snapkv", 1, 60, 40, plan="adakv")


@pytest.mark.parametrize("policy", ["duoattention", "less", "triattention"])
def test_policies_that_read_weights_say_so_where_there_are_none(policy):
    shaped = shaped_model(kvjax.load("tiny").config, "float32", None, None)
    with pytest.raises(
        ValueError, match="needs a model's weights, of which there are only shapes here; load the model"
    ):
        state_shapes(shaped, policy, 1, 60, 40)


def test_policies_that_need_more_than_shapes_are_left_out(capsys):
    words = ["--model", "toy", "--batch", "2", "--prompt-tokens", "64", "--new-tokens", "8", "--budgets", "16"]
    assert scale.main([*words, "--policies", "fastgen"]) == 2
    assert "no policy is left to benchmark, for the reasons above" in capsys.readouterr().err
    assert scale.main([*words, "--policies", "fastgen,streaming"]) == 0
    told = capsys.readouterr()
    assert "fastgen at 1.0 is left out: fastgen needs special=(ids)" in told.err
    assert "streaming" in told.out and "fastgen" not in told.out


def test_shapes_of_rounded_weights_are_those_that_are_loaded():
    model = kvjax.load("tiny", dtype="bfloat16", weights="int8")
    assert described(rounded_shapes(weight_shapes(model.config, jnp.bfloat16))) == described(
        jax.tree.map(signed, model.weights)
    )


def test_collectives_are_counted_once_each():
    text = """
  %all-reduce-start.1 = bf16[8,64]{1,0:T(8,128)(2,1)S(1)} all-reduce-start(%x), channel_id=1, metadata={op="a"}
  %all-reduce-done.1 = bf16[8,64]{1,0} all-reduce-done(%all-reduce-start.1)
  %psum.3 = (f32[8]{0}, f32[8]{0}) all-reduce(%a, %b), replica_groups={{0,1}}
  ROOT %all-gather.7 = f32[16]{0} all-gather(%c), dimensions={0}
  %fusion = f32[8] fusion(%all-gather.7), calls=%computation
"""
    assert collectives(text) == {"all-reduce": 2, "all-gather": 1}


def test_meshes_and_shapes_by_name():
    assert mesh_shape("2x16") == (2, 16, 1) and mesh_shape("1x2x8") == (1, 2, 8)
    assert config_named("llama-70b") is SHAPES["llama_70b"]
    assert config_named("tiny") == kvjax.load("tiny").config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--mesh 2", "mesh '2' is not of the form 2x4"),
        ("--mesh 1x0", "mesh '1x0' is not of the form 2x4"),
        ("--mesh 1x99", "a mesh of 99 devices is more than the"),
        ("--for v1", "'v1' is no device to compile for: give one of here, cpu, v4, v5e"),
        ("--model nowhere", "there is no shape 'nowhere': give tiny, toy"),
        ("--policies nope", "no policy 'nope'"),
        ("--policies fastgen,h2o --budgets same", "budget 'same' is for races"),
        ("--policies h2o --budgets 0.25 --for cpu --throughput", "--throughput is for devices at hand, not for cpu"),
        ("--batch 0", "--batch 0 is not a whole number from 1"),
    ],
)
def test_a_mistake_is_one_sentence(words, message, capsys):
    assert bench.main(["scale", "--policies", "h2o", *words.split()]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_a_missing_compiler_is_one_sentence(capsys, monkeypatch):
    def missing(**_):
        raise RuntimeError("no such plugin.\nand more")

    monkeypatch.setattr("benchmarks.targets.ENVIRONMENT", {})
    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", missing)
    assert bench.main(["scale", "--for", "v6e:2x4"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "kvjax bench scale: there is no compiler for v6e:2x4 here (no such plugin); pip install jax[tpu].\n"
    )
    assert bench.main(["deployments", "--chips", "v9"]) == 2
    assert "there is no chip 'v9'; choose of v5e, v5p, v6e, h100" in capsys.readouterr().err


def test_steps_on_virtual_devices_have_bytes_and_collectives_but_no_speed(tmp_path):
    file = tmp_path / "rows.json"
    words = "-m kvjax.bench scale --model toy --mesh 1x8 --for cpu --policies h2o --budgets 16 --batch 2"
    words += f" --prompt-tokens 24 --new-tokens 8 --json {file}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *words.split()], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "No tokens per second: virtual devices share the cores of one CPU" in done.stdout
    full, h2o = json.loads(file.read_text())["rows"]
    config = SHAPES["toy"]
    shared = 2 * config.layers + 1  # after attention, after the MLP, and the embedding
    assert full["collectives"]["all-reduce"] == shared
    assert h2o["collectives"]["all-to-all"] == config.layers  # shares of attention
    assert h2o["collectives"]["all-gather"] == 1  # all victims
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight_shapes(config, jnp.bfloat16)))
    assert whole / 8 < h2o["weight_bytes"] < whole / 2
    assert 0 < h2o["cache_bytes"] < full["cache_bytes"]
    assert full["devices"] == 8 and full["tokens_per_second"] is None


@pytest.mark.skipif(
    VARIABLE not in os.environ, reason=f"{VARIABLE} names no Python that has jax[tpu]; .ci/run makes one"
)
def test_steps_over_a_mesh_of_tpus_call_kernels_and_change_caches_in_place(tmp_path):
    file = tmp_path / "rows.json"
    words = "-W ignore -m kvjax.bench scale --model toy --mesh 1x4,1x8 --for v5e:2x4 --policies h2o --budgets 256"
    words += f" --prompt-tokens 1000 --batch 2 --json {file}"
    done = subprocess.run([os.environ[VARIABLE], *words.split()], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for row in json.loads(file.read_text())["rows"]:
        whole = row["policy"] == "h2o" and row["devices"] == 4  # heads whose slots are all here, in whole blocks
        assert ("fused_decode" if whole else "decode_attention") in row["kernels"]
        # Toy's layers have keys and values of 64 numbers; half of its heads' slots are elsewhere on eight devices.
        slots = 2 * 2 * 4 * (256 if row["policy"] == "h2o" else 1088) // row["devices"]
        assert row["cache_bytes"] > slots * 2 * 64 * 2


def step(weights: float, caches: float, temporary: float, rows: int = 2, **collectives: int) -> dict[str, object]:
    sizes = dict[str, object](weight_bytes=weights, cache_bytes=caches, temporary_bytes=temporary)
    return sizes | dict(rows=rows, collectives=collectives)


def test_whole_models_follow_from_a_few_layers():
    each = Deployment("llama_70b", "v5e", "v5e:4x4", 16)
    variant, context = Variant("h2o", 0.25), 32768
    kept = {
        f"{each.name}, {FEW} layers": step(2e8 + 2e6, 0, 5e6, **{"all-reduce": 5}),
        f"{each.name}, {MORE} layers": step(2e8 + 4e6, 0, 5e6, **{"all-reduce": 9}),
        f"{each.name}, 32768, h2o 0.25, bfloat16": step(2e8, 6e6 * FEW, 7e6, rows=3),
    }
    free = MEMORY["v5e"] - 2.8e8
    found = deployments.fit(each, kept, variant, context)
    assert found == deployments.Fit(2.8e8, 160e6, 7e6, int((free - 7e6) // 160e6), True)
    # Eight rows of all layers have 8 * 80 MB more temporary memory.
    kept[f"{each.name}, 80 layers"] = step(0, 0, 5e6 + 8 * 80e6)
    found = deployments.fit(each, kept, variant, context)
    assert found is not None and found.rows == int((free - 7e6) // 240e6)
    assert found.temporary == 7e6 + found.rows * 80e6
    shorter = deployments.fit(each, kept, variant, context // 4)
    assert shorter is not None and not shorter.compiled
    assert (shorter.row, shorter.rows) == (40e6, int((free - 28e6) // 60e6))
    kept[f"{each.name}, 80 layers"] = step(0, 0, MEMORY["v5e"], **{"all-reduce": 161})
    found = deployments.fit(each, kept, variant, context)
    assert found is not None and found.rows == 0
    assert deployments.fit(each, kept, Variant("full", 1.0), context) is None
    text = deployments.page(kept)
    assert "### llama_70b in bfloat16 on 16 v5e" in text and "Collectives per layer under `h2o`: 2 all-reduce." in text


def test_the_page_is_that_of_its_rows():
    results = ROOT / "docs" / "results"
    assert deployments.page(deployments.measured(results / "scale")) == (results / "scale.md").read_text()
