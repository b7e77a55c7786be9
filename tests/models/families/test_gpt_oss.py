"""Layouts of gpt-oss: the same weights from tensors of all experts, and from those of each."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax.model import load
from kvjax.models.families import read_model_config
from kvjax.models.weights import leaf_name, weight_shapes
from tests.models.checkpoints.test_loading import SETTINGS, refused


@pytest.mark.parametrize("layout", ["one map for each expert", "two maps for each expert"])
def test_gpt_oss_with_tensors_for_each_expert(layout: str, tmp_path: Path) -> None:
    settings = {**SETTINGS, "model_type": "gpt_oss", "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    family, config = read_model_config(settings)
    draw, tensors = np.random.default_rng(0), dict[str, np.ndarray]()
    for path, leaf in jax.tree.leaves_with_path(weight_shapes(config)):
        source = family.source(leaf_name(path))
        shape = leaf.shape if source.shape is None else source.shape(leaf.shape, config)
        tensors[source.name] = draw.standard_normal(shape, np.float32)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    save_file(tensors, tmp_path / "model.safetensors")
    weights, rounded = load(tmp_path).weights, load(tmp_path, weights="int8").weights
    split = dict(tensors)
    for name in [name for name in tensors if ".experts." in name]:
        block, _, kind = name.rpartition(".experts.")
        part = "bias" if kind.endswith("_bias") else "weight"
        for expert, tensor in enumerate(split.pop(name)):
            matrix = np.ascontiguousarray(tensor.T)  # a bias stays as it is
            if "down" in kind:
                maps = {"down": matrix}
            elif layout.startswith("one"):
                maps = {"gate_up": matrix}
            else:
                maps = {"gate": matrix[::2].copy(), "up": matrix[1::2].copy()}
            for of_map, numbers in maps.items():
                place = f"{of_map}_projs.{expert}" if layout.startswith("one") else f"{expert}.{of_map}_proj"
                split[f"{block}.experts.{place}.{part}"] = numbers
    if layout.startswith("one"):
        split = {re.sub(r"\.router\.(\w+)$", r".router.linear.\1", name): tensor for name, tensor in split.items()}
    save_file(split, tmp_path / "model.safetensors")
    assert not set(load_file(tmp_path / "model.safetensors")) & {name for name in tensors if ".experts." in name}
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path).weights, weights)
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path, weights="int8").weights, rounded)

    split.pop(next(name for name in split if re.search(r"\.experts\.(\w+\.)?2\.", name)))
    save_file(split, tmp_path / "model.safetensors")
    refused(tmp_path, r"tensor model\.layers\.\d\.mlp\.experts\..*2\..* is missing")
