"""Checkpoints with quantised weights: what is read equals the numbers it stands for, everything else is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
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
from kvjax.models.families import read_model_config
from kvjax.models.linear import code_dtype
from kvjax.models.mlp import Experts
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


def float8(directory: Path, kinds: dict[str, str]) -> None:
    """Rename the type of some bytes in a file to floats of 8 bits, which NumPy's writer does not know."""
    file = directory / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for name, kind in kinds.items():
        header[name]["dtype"] = kind
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


def test_mxfp4_experts_of_gpt_oss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    random_checkpoint("gpt_oss", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    compact = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        compact[f"{name}_blocks"], compact[f"{name}_scales"], tensors[name] = packed(compact.pop(name))
    save_file(tensors, tmp_path / "model.safetensors")
    whole = kvjax.load(tmp_path)
    quantise(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, compact)
    calls = list[Any]()

    def counted(*given: Any) -> np.ndarray:
        calls.append(given)
        return of_mxfp4(*given)

    monkeypatch.setattr("kvjax.models.checkpoints.quantised.of_mxfp4", counted)
    model = kvjax.load(tmp_path)
    assert len(calls) == 3 * 2 * 8  # layers, tensors and experts: gates and up projections share a tensor
    jax.tree.map(np.testing.assert_array_equal, model.weights, whole.weights)
    mlp = kvjax.load(tmp_path, weights="int8").weights.layers[0].mlp
    assert isinstance(mlp, Experts)
    experts = mlp.experts
    assert experts.up.weight.dtype == code_dtype("cpu") and experts.up.weight.shape == (8, 96, 64)

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
        float8(tmp_path, dict.fromkeys(codes, "F8_E4M3"))
    jax.tree.map(np.testing.assert_array_equal, kvjax.load(tmp_path).weights, whole.weights)
    assert main(["convert", "--model", str(tmp_path), "--out", str(tmp_path / "out"), "--dtype", "float32"]) == 0
    jax.tree.map(np.testing.assert_array_equal, kvjax.load(tmp_path / "out").weights, whole.weights)


def words(numbers: np.ndarray, bits: int, axis: int, order: Sequence[int] | None = None) -> np.ndarray:
    """Integers in words of 32 bits along an axis, the first in the lowest bits unless there is another order."""
    count = 32 // bits
    numbers = np.moveaxis(numbers, axis, -1)
    made = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // count), np.int64)
    for word, place in np.ndindex(made.shape[-1], count):
        which = place if order is None else order[place]
        made[..., word] |= numbers[..., word * count + which].astype(np.int64) << (bits * place)
    return np.ascontiguousarray(np.moveaxis(made.astype(np.uint32).view(np.int32), -1, axis))


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "GEMM"}


@pytest.mark.parametrize(
    ("config", "offset", "ordered"),
    [
        (GPTQ, 1, False),
        (GPTQ | {"desc_act": True, "dynamic": {"-:.*lm_head": {}}}, 1, True),
        (GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"}, 0, False),
        (GPTQ | {"bits": 2}, 1, False),
        (AWQ, None, False),
    ],
    ids=["gptq", "gptq by activations", "gptq_v2 of 8 bits", "gptq of 2 bits", "awq"],
)
def test_packed_weights(config: dict[str, Any], offset: int | None, ordered: bool, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    random_checkpoint("qwen3", tmp_path)
    tensors, rng, bits = load_file(tmp_path / "model.safetensors"), np.random.default_rng(0), config["bits"]
    compact = dict(tensors)
    for name in [name for name in tensors if "_proj.weight" in name]:
        (out, into), module = compact.pop(name).shape, name.removesuffix("weight")
        numbers, zeros = rng.integers(0, 2**bits, (into, out)), rng.integers(0, 2**bits, (into // 16, out))
        scales = rng.uniform(0.01, 0.02, zeros.shape).astype(np.float16)
        group = rng.permutation(into) // 16 if ordered else np.arange(into) // 16
        if offset is None:  # AWQ's words hold eight outputs, the even ones before the odd ones
            order = (0, 2, 4, 6, 1, 3, 5, 7)
            compact[f"{module}qweight"], compact[f"{module}qzeros"] = (
                words(numbers, 4, 1, order),
                words(zeros, 4, 1, order),
            )
        else:
            compact[f"{module}qweight"] = words(numbers, bits, 0)
            compact[f"{module}qzeros"] = words((zeros - offset) % 2**bits, bits, 1)
            compact[f"{module}g_idx"] = group.astype(np.int32)
        compact[f"{module}scales"] = scales
        tensors[name] = ((numbers - zeros[group]) * scales.astype(np.float32)[group]).T.astype(np.float32).copy()
    save_file(tensors, tmp_path / "model.safetensors")
    whole = kvjax.load(tmp_path)
    quantise(tmp_path, config, compact)
    jax.tree.map(np.testing.assert_array_equal, kvjax.load(tmp_path).weights, whole.weights)

    zeros = compact.pop("model.layers.1.mlp.up_proj.qzeros")
    quantise(tmp_path, config, compact)
    with pytest.raises(LoadError, match=r"up_proj\.qweight has no model\.layers\.1\.mlp\.up_proj\.qzeros beside it"):
        kvjax.load(tmp_path)
    compact["model.layers.1.mlp.up_proj.qzeros"] = zeros[:-1].copy()
    quantise(tmp_path, config, compact)
    with pytest.raises(LoadError, match=rf"shapes of model\.layers\.1\.mlp\.up_proj do not fit {bits} bits"):
        kvjax.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (GPTQ | {"bits": 3}, "gptq of 3 bits is not supported; kvjax reads fp8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "gptq in checkpoint_format 'marlin' is not"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype 'int16' is not supported"),
        (GPTQ | {"dynamic": {"+:.*down": {"bits": 8}}}, r"modules differ \(dynamic '\+:\.\*down'\) is not supported"),
        (AWQ | {"bits": 3}, "awq of 3 bits is not supported"),
        (AWQ | {"version": "gemv"}, "awq of version 'gemv' and zero_point True is not supported"),
        ({"quant_method": "bitsandbytes", "bits": 4}, r"quant_method 'bitsandbytes' \(4 bits\) is not supported"),
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
