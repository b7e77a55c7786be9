"""Mixtures of experts: blocks of rows, layouts of checkpoints, 8-bit weights, and text from the command line."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax.cli.main import main
from kvjax.models import LoadError, random_weights
from kvjax.models.families import read_model_config
from kvjax.models.fingerprint import fingerprint, fingerprints
from kvjax.models.linear import Linear, code_dtype
from kvjax.models.mlp import DenseMlp, Experts, block_size, blocks
from kvjax.models.weights import leaf_name
from kvjax.tiny import WEIGHTS
from tests.paths import ROOT
from tests.small_models import MIXED, random_checkpoint, random_model

SETTINGS = {
    "model_type": "qwen3_moe",
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "max_position_embeddings": 512,
    "eos_token_id": 3,
}


def write(directory: Path, **changes: Any) -> dict[str, np.ndarray]:
    """A checkpoint with one tensor for each map of each expert, as published ones have; returns its tensors."""
    settings, tensors = SETTINGS | changes, dict[str, np.ndarray]()
    family, config = read_model_config(settings)
    for path, leaf in jax.tree.leaves_with_path(random_weights(config, jax.random.key(0))):
        names = family.source(leaf_name(path)).names(leaf.shape)
        parts = np.asarray(leaf) if len(names) > 1 else [np.asarray(leaf)]
        tensors |= dict(zip(names, parts, strict=True))
    (directory / "config.json").write_text(json.dumps(settings))
    save_file(tensors, directory / "model.safetensors")
    return tensors


def loop(experts: Experts, x: np.ndarray, used: int) -> np.ndarray:
    """What a mixture computes, one token and one expert after the other."""
    inner, out = experts.experts, np.zeros_like(x)
    assert inner.gate is not None
    gates, ups, downs = (np.asarray(each.matrix, np.float64) for each in (inner.gate, inner.up, inner.down))
    for row, total in zip(x, out, strict=True):
        logits = np.asarray(experts.router, np.float64) @ row
        probs = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        chosen = np.argsort(-probs)[:used]
        for expert in chosen:
            gate = gates[expert] @ row
            total += (
                probs[expert]
                / probs[chosen].sum()
                * (downs[expert] @ (gate / (1 + np.exp(-gate)) * (ups[expert] @ row)))
            )
    return out


@pytest.mark.parametrize("rows", [1, 2, 7, 40, 400])
def test_a_mixture_is_the_sum_of_its_experts(rows: int, x64: None) -> None:
    experts = random_model(MIXED, dtype=jnp.float64).weights.layers[0].mlp
    assert isinstance(experts, Experts)
    x = np.random.default_rng(rows).normal(size=(1, rows, 32))
    np.testing.assert_allclose(experts(jnp.asarray(x), MIXED)[0], loop(experts, x[0], 3), atol=1e-12)


@pytest.mark.parametrize("mean", [0.5, 2, 8, 50, 1000])
@pytest.mark.parametrize("here", [8, 3])
def test_blocks_have_every_use_once_and_one_expert_each(mean: float, here: int) -> None:
    uses = int(mean * 8)
    chosen = np.minimum(np.random.default_rng(0).integers(0, 8, uses) ** 2 // 8, here)
    expert, table = blocks(jnp.asarray(chosen), here, 8)
    assert table.shape[1] == block_size(mean)
    for number, row in zip(expert, np.asarray(table), strict=True):
        assert (chosen[row[row < uses]] == number).all()
    assert sorted(table[table < uses].tolist()) == np.flatnonzero(chosen < here).tolist()
    empty = (table == uses).all(1)
    assert not empty[: int((~empty).sum())].any() and (np.asarray(table)[~empty][:, 0] < uses).all()


def test_derivatives_go_through_experts(x64: None) -> None:
    model = random_model(MIXED, dtype=jnp.float64)

    first, *others = model.weights.layers
    mlp = first.mlp
    assert isinstance(mlp, Experts)

    def loss(router: jax.Array) -> jax.Array:
        layers = (dataclasses.replace(first, mlp=Experts(router, mlp.experts)), *others)
        changed = kvjax.Model(dataclasses.replace(model.weights, layers=layers), MIXED, "changed")
        return jnp.sin(kvjax.prefill(changed, "h2o", [[5, 9, 2, 7, 7, 1, 30, 22]], 6)[1]).sum()

    along = jnp.asarray(np.random.default_rng(0).normal(size=mlp.router.shape))
    slope = jax.grad(loss)(mlp.router)
    difference = (loss(mlp.router + 1e-6 * along) - loss(mlp.router - 1e-6 * along)) / 2e-6
    np.testing.assert_allclose(jnp.vdot(slope, along), difference, rtol=1e-5)


@pytest.mark.parametrize("layout", ["fused", "merged"])
def test_other_layouts_of_experts_are_the_same_model(layout: str, tmp_path: Path) -> None:
    tensors = write(tmp_path)
    expected = kvjax.load(tmp_path)
    block = "model.layers.0.mlp.experts"
    parts = {
        kind: np.stack([tensors.pop(f"{block}.{expert}.{kind}_proj.weight") for expert in range(8)])
        for kind in ("gate", "up", "down")
    }
    made = (
        {f"{block}.gate_up_proj": np.concatenate([parts["gate"], parts["up"]], 1), f"{block}.down_proj": parts["down"]}
        if layout == "fused"
        else {f"{block}.{kind}_proj.weight": tensor for kind, tensor in parts.items()}
    )
    save_file(tensors | made, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, kvjax.load(tmp_path).weights, expected.weights)


def test_experts_of_llama4_may_have_tensors_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    random_checkpoint("llama4", tmp_path)
    expected, tensors = kvjax.load(tmp_path), load_file(tmp_path / "model.safetensors")
    for layer in (1, 3):
        block = f"model.layers.{layer}.feed_forward.experts"
        fused, down = tensors.pop(f"{block}.gate_up_proj"), tensors.pop(f"{block}.down_proj")
        for expert in range(4):
            maps = zip(("gate", "up", "down"), (*np.split(fused[expert], 2, 1), down[expert]), strict=True)
            tensors |= {f"{block}.{expert}.{name}_proj.weight": np.ascontiguousarray(each.T) for name, each in maps}
    save_file(tensors, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, kvjax.load(tmp_path).weights, expected.weights)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    tensors = write(tmp_path)
    name = "model.layers.0.mlp.experts.5.up_proj.weight"
    tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=rf"tensor {name} of shape \[24, 32\] is missing"):
        kvjax.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but num_experts is 8"),
        ({"num_local_experts": 0}, "num_local_experts must be an integer above 0, not 0"),
        ({"mlp_only_layers": 1}, "mlp_only_layers must be a list of layers' numbers, not 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LoadError, match=sentence):
        read_model_config(SETTINGS | changes)


def test_experts_in_8_bits(tmp_path: Path) -> None:
    write(tmp_path)
    model, whole = kvjax.load(tmp_path, weights="int8"), kvjax.load(tmp_path)
    experts = model.weights.layers[0].mlp
    assert isinstance(experts, Experts) and experts.router.dtype == np.float32
    assert isinstance(model.weights.layers[1].mlp, DenseMlp)
    assert fingerprints(model)[0] == fingerprint(whole) != fingerprint(model)
    up = experts.experts.up
    assert up.weight.shape == (8, 24, 32) and up.weight.dtype == code_dtype("cpu")
    assert up.scale is not None and up.scale.shape == (8, 24)
    rounded = jax.tree.map(
        lambda node: node if not isinstance(node, Linear) or node.scale is None else Linear(node.matrix, node.bias),
        model.weights,
        is_leaf=lambda node: isinstance(node, Linear),
    )
    ids = np.arange(24)[None]
    logits = model.logits(ids)
    np.testing.assert_allclose(logits, kvjax.Model(rounded, model.config).logits(ids), atol=1e-3)
    assert 1e-3 < np.abs(np.asarray(logits) - whole.logits(ids)).max() < 0.3


def test_a_converted_mixture_is_the_same(tmp_path: Path) -> None:
    write(tmp_path)
    assert main(["convert", "--model", str(tmp_path), "--out", str(tmp_path / "out"), "--dtype", "float32"]) == 0
    jax.tree.map(np.testing.assert_array_equal, kvjax.load(tmp_path / "out").weights, kvjax.load(tmp_path).weights)


COMMANDS = {
    "h2o": ["--policy", "h2o"],
    "less": ["--policy", "less", "--set", "base=keyformer", "--set", "kernels=performer"],
    "fastgen": ["--policy", "fastgen"],
    "int8": ["--policy", "h2o+int8", "--weights", "int8"],
}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4"])
@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_writes_the_same_on_one_device_and_on_eight(name: str, family: str, tmp_path: Path) -> None:
    vocab_size = json.loads((WEIGHTS / "config.json").read_text())["vocab_size"]
    if family != "qwen3_moe":
        pytest.importorskip("torch")
        random_checkpoint(family, tmp_path, vocab_size=vocab_size)
    else:
        write(tmp_path, vocab_size=vocab_size)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(WEIGHTS / file, tmp_path)
    words = ["generate", "--model", str(tmp_path), "--prompt", "Once upon a time there was a fox and a fox.", "--json"]
    words += [*COMMANDS[name], "--temperature", "0", "--ignore-eos", "--max-new-tokens", "12"]
    words += [] if name == "fastgen" else ["--budget", "10"]
    texts: list[str] = []
    for mesh in ([], ["--mesh", "model=8"]):
        done = subprocess.run(
            [sys.executable, "-m", "kvjax", *words, *mesh],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        texts.append(json.loads(done.stdout)["text"])
    assert texts[0] and texts[0] == texts[1]
