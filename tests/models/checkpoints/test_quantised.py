"""Checkpoints with quantised weights: what is read equals the numbers it stands for, everything else is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax.cli.main import main
from kvjax.models import LoadError
from kvjax.models.checkpoints.quantised import of_mxfp4
from kvjax.models.experts import Experts
from kvjax.models.families import read_model_config
from tests.small_models import random_checkpoint

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 24]}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}},
}


def quantise(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Write tensors, and a quantization into the config."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    save_file(tensors, directory / "model.safetensors")


def float8(directory: Path, names: set[str]) -> None:
    """Rename the type of some bytes in a file to floats of 8 bits, which NumPy's writer does not know."""
    file = directory / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for name in names:
        header[name]["dtype"] = "F8_E4M3"
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def test_mxfp4_is_what_its_standard_says() -> None:
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (5, 3, 16)).astype(np.uint8), rng.integers(0, 250, (5, 3)).astype(np.uint8)
    found = of_mxfp4(blocks, scales)
    assert found.shape == (5, 96)
    for row, block, at in np.ndindex(5, 3, 32):
        code = int(blocks[row, block, at // 2]) >> (4 * (at % 2)) & 15
        value = (-1) ** (code >> 3) * magnitudes[code & 7] * math.ldexp(1, int(scales[row, block]) - 127)
        assert found[row, 32 * block + at] == np.float32(value)
    scales[2, 1] = 255
    assert np.isnan(of_mxfp4(blocks, scales)[2, 32:64]).all()


def packed(tensor: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The nearest MXFP4 blocks and scales of maps [experts, in, out], and the maps that these stand for."""
    experts, into, out = tensor.shape
    blocks = np.ascontiguousarray(tensor.swapaxes(1, 2)).reshape(experts, out, into // 32, 32)
    exponents = np.floor(np.log2(np.abs(blocks).max(-1))).astype(int) - 2
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scaled = blocks / 2.0 ** exponents[..., None]
    nearest = np.abs(np.abs(scaled)[..., None] - magnitudes).argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).astype(np.uint8)
    numbers = np.sign(scaled) * magnitudes[nearest] * 2.0 ** exponents[..., None]
    whole = np.ascontiguousarray(numbers.reshape(experts, out, into).swapaxes(1, 2), np.float32)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).astype(np.uint8), whole


def test_mxfp4_experts_of_gpt_oss(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    random_checkpoint("gpt_oss", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    compact = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        compact[f"{name}_blocks"], compact[f"{name}_scales"], tensors[name] = packed(compact.pop(name))
    save_file(tensors, tmp_path / "model.safetensors")
    whole = kvjax.load(tmp_path)
    quantise(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, compact)
    model = kvjax.load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, model.weights, whole.weights)
    mlp = kvjax.load(tmp_path, weights="int8").weights.layers[0].mlp
    assert isinstance(mlp, Experts)
    experts = mlp.experts
    assert experts.up.weight.dtype == np.int8 and experts.up.weight.shape == (8, 96, 64)

    compact["model.layers.1.mlp.experts.down_proj_scales"] = np.zeros((8, 64, 2), np.uint8)
    quantise(tmp_path, {"quant_method": "mxfp4"}, compact)
    with pytest.raises(LoadError, match=r"down_proj_blocks has shape \[8, 64, 3, 16\], which does not fit scales of"):
        kvjax.load(tmp_path)


@pytest.mark.parametrize("kind", ["fp8 in blocks", "fp8", "int8"])
def test_weights_of_8_bits(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    random_checkpoint("qwen3", tmp_path)
    tensors, rng = load_file(tmp_path / "model.safetensors"), np.random.default_rng(0)
    compact, codes = dict(tensors), set[str]()
    for name in [name for name in tensors if "_proj.weight" in name]:
        codes.add(name)
        out, into = tensors[name].shape
        if kind == "int8":
            numbers = rng.integers(-127, 128, (out, into)).astype(np.int8)
            scale = rng.uniform(0.001, 0.002, (out, 1)).astype(np.float32)
            compact[name], compact[f"{name}_scale"], factors = numbers, scale, scale
        else:
            blocks = (16, 24) if kind == "fp8 in blocks" else (out, into)
            numbers = np.asarray(jnp.asarray(rng.normal(0, 10, (out, into)), jnp.float8_e4m3fn))
            count = (-(-out // blocks[0]), -(-into // blocks[1])) if kind == "fp8 in blocks" else ()
            scale = rng.uniform(0.01, 0.02, count).astype(np.float32)
            factors = np.kron(np.atleast_2d(scale), np.ones(blocks, np.float32))[:out, :into]
            compact[name], compact[f"{name}_scale_inv"] = numbers.view(np.uint8), scale
            compact[name.replace("weight", "activation_scale")] = np.ones(1, np.float32)
        tensors[name] = numbers.astype(np.float32) * factors
    save_file(tensors, tmp_path / "model.safetensors")
    whole = kvjax.load(tmp_path)
    config = {"int8": INT8, "fp8": {"quant_method": "fp8"}}.get(kind, FP8)
    quantise(tmp_path, config, compact)
    if kind != "int8":
        float8(tmp_path, codes)
    jax.tree.map(np.testing.assert_array_equal, kvjax.load(tmp_path).weights, whole.weights)
    assert main(["convert", "--model", str(tmp_path), "--out", str(tmp_path / "out"), "--dtype", "float32"]) == 0
    jax.tree.map(np.testing.assert_array_equal, kvjax.load(tmp_path / "out").weights, whole.weights)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            r"quant_method 'gptq' \(4 bits\) is not supported; kvjax reads fp8",
        ),
        ({"quant_method": "awq", "bits": 4}, r"quant_method 'awq' \(4 bits\) is not supported"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
        ({"bits": 4}, r"quant_method None \(4 bits\) is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"blocks of \[0, 128\] is not supported"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "format 'pack-quantized' is not"),
        (INT8 | {"config_groups": {"a": {"weights": {"num_bits": 4}}}}, r"weights \{'num_bits': 4\} is not supported"),
        (
            INT8 | {"config_groups": {"a": {"weights": {"num_bits": 8, "strategy": "group"}}}},
            "strategy 'group' is not supported",
        ),
    ],
)
def test_other_quantizations_are_refused_by_name(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LoadError, match=sentence):
        read_model_config({"model_type": "llama", "quantization_config": config})
