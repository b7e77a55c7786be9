"""Quantised checkpoints whose settings and tensors contradict each other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvjax.model import load
from kvjax.models import LoadError
from kvjax.models.checkpoints.quantised import decoded
from kvjax.models.checkpoints.tensors import read_safetensors
from kvjax.models.families.quantization import read_quantization
from tests.models.checkpoints.test_loading import QUERY, edit, refused, write
from tests.models.checkpoints.test_quantised import AWQ, GPTQ, INT8, float8, words

INTO, OUT, GROUPS = 32, 16, 4
SEQUENCE = np.arange(INTO) // 8
PERMUTED = np.random.default_rng(1).permutation(SEQUENCE)
ZEROS = np.zeros(INTO, int)
SYMMETRIC = GPTQ | {"group_size": 8, "sym": True}
PLAIN = GPTQ | {"group_size": 8}


def write_module(
    directory: Path,
    config: dict[str, Any],
    groups: int,
    index: np.ndarray | None,
    zeros: np.ndarray | None,
    **more: Any,
) -> dict[str, np.ndarray]:
    """Write one packed map and return its tensors; `index` is its `g_idx` and `zeros` are the integers in `qzeros`."""
    rng, bits = np.random.default_rng(0), config["bits"]
    numbers = rng.integers(0, 2**bits, (INTO, OUT))
    stored = rng.integers(0, 2**bits, (groups, OUT)) if zeros is None else np.broadcast_to(zeros, (groups, OUT))
    awq = config["quant_method"] == "awq"
    order = (0, 2, 4, 6, 1, 3, 5, 7) if awq else None
    tensors = {
        "m.qweight": words(numbers, bits, int(awq), order),
        "m.qzeros": words(stored, bits, 1, order),
        "m.scales": rng.uniform(0.5, 1.5, (groups, OUT)).astype(np.float16),
    }
    if index is not None:
        tensors["m.g_idx"] = index.astype(np.int32)
    save_file(tensors | more, directory / "model.safetensors")
    return {"numbers": numbers, "zeros": stored, "scales": tensors["m.scales"].astype(np.float32)}


def read_module(directory: Path, config: dict[str, Any]) -> np.ndarray:
    quantization = read_quantization({"quantization_config": config})
    assert quantization is not None
    return decoded(read_safetensors(directory), quantization).tensors["m.weight"].read(np.dtype(np.float32))


@pytest.mark.parametrize(
    ("config", "index", "stored", "groups", "added"),
    [
        (PLAIN | {"desc_act": False}, ZEROS, None, SEQUENCE, 1),
        (PLAIN, ZEROS, None, SEQUENCE, 1),
        ({name: value for name, value in PLAIN.items() if name != "group_size"}, ZEROS, None, SEQUENCE, 1),
        (PLAIN | {"desc_act": False}, PERMUTED, None, PERMUTED, 1),
        (PLAIN | {"desc_act": True}, PERMUTED, None, PERMUTED, 1),
        (PLAIN, None, None, SEQUENCE, 1),
        (PLAIN | {"group_size": -1}, ZEROS, None, ZEROS, 1),
        (PLAIN | {"group_size": 12}, None, None, np.arange(INTO) // 12, 1),
        (PLAIN | {"checkpoint_format": "gptq_v2"}, ZEROS, None, SEQUENCE, 0),
        (PLAIN | {"format": "gptq_v2"}, ZEROS, None, SEQUENCE, 0),
        (PLAIN, ZEROS, 8, SEQUENCE, 1),  # sym is false: 9, whatever half of the range is
        (AWQ | {"group_size": 8}, None, 7, SEQUENCE, 0),
        (AWQ | {"group_size": 12}, None, None, np.arange(INTO) // 12, 0),
        (AWQ | {"bits": 4, "group_size": 8, "sym": True, "desc_act": False}, None, None, SEQUENCE, 0),
    ],
)
def test_packed_weights_are_a_literal_decode(
    config: dict[str, Any], index: np.ndarray | None, stored: Any, groups: np.ndarray, added: int, tmp_path: Path
) -> None:
    parts = write_module(tmp_path, config, int(groups.max()) + 1, index, stored)
    weight = read_module(tmp_path, config)
    assert weight.shape == (OUT, INTO)
    for out, into in np.ndindex(OUT, INTO):
        zero = (int(parts["zeros"][groups[into], out]) + added) % 2 ** config["bits"]
        assert weight[out, into] == (int(parts["numbers"][into, out]) - zero) * parts["scales"][groups[into], out]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("less", [0, 1])
@pytest.mark.parametrize("sym", [True, None])
def test_a_symmetric_zero_point_is_half_of_the_range(
    bits: int, form: str, less: int, sym: bool | None, tmp_path: Path
) -> None:
    config = SYMMETRIC | {"bits": bits, "checkpoint_format": form, "sym": sym}
    parts = write_module(tmp_path, config, GROUPS, ZEROS, np.array(2 ** (bits - 1) - less))
    expected = (parts["numbers"] - 2 ** (bits - 1)) * parts["scales"][SEQUENCE]
    np.testing.assert_array_equal(read_module(tmp_path, config), expected.T.astype(np.float32))


@pytest.mark.parametrize(
    ("config", "index", "stored", "sentence"),
    [
        (PLAIN, SEQUENCE + 1, None, r"m\.g_idx has groups from 1 to 4, but there are 4, from 0"),
        (PLAIN, SEQUENCE - 1, None, r"m\.g_idx has groups from -1 to 2, but there are 4, from 0"),
        (
            PLAIN | {"desc_act": True},
            ZEROS,
            None,
            "puts all inputs into the first of 4 groups: .* set desc_act to false",
        ),
        (
            SYMMETRIC,
            None,
            None,
            r"m\.qzeros has integers from 0 to 15, but sym is true, with 7 or 8 for all: set sym to",
        ),
        (SYMMETRIC, None, np.arange(OUT) % 2 + 7, "has integers from 7 to 8, but sym is true"),
        (PLAIN | {"group_size": 16}, ZEROS, None, r"m\.scales has 4 groups, but group_size 16 makes 2 of 32 inputs"),
        (PLAIN | {"group_size": -1}, SEQUENCE, None, r"m\.scales has 4 groups, but group_size -1 makes 1 of 32 inputs"),
        (AWQ, None, None, r"m\.scales has 4 groups, but group_size 16 makes 2 of 32 inputs"),
    ],
)
def test_contradictions_are_named(
    config: dict[str, Any], index: np.ndarray | None, stored: Any, sentence: str, tmp_path: Path
) -> None:
    write_module(tmp_path, config, GROUPS, index, stored)
    with pytest.raises(LoadError, match=sentence):
        read_module(tmp_path, config)


def test_a_map_has_one_weight(tmp_path: Path) -> None:
    write_module(tmp_path, PLAIN, GROUPS, None, None, **{"m.weight": np.zeros((OUT, INTO), np.float32)})
    with pytest.raises(LoadError, match=r"safetensors: tensor m\.weight is stored twice, quantised and as it is"):
        read_module(tmp_path, PLAIN)
    blocks = {"m_blocks": np.zeros((1, 2, 3, 16), np.uint8), "m_scales": np.zeros((1, 2, 3), np.uint8)}
    save_file({**blocks, "m": np.zeros((1, 96, 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"model\.safetensors: tensor m is stored twice, quantised and as it is"):
        read_module(tmp_path, {"quant_method": "mxfp4"})


def test_codes_without_a_scale_are_named(tmp_path: Path) -> None:
    save_file({"m.weight": np.zeros((2, 3), np.uint8)}, tmp_path / "model.safetensors")
    float8(tmp_path, {"m.weight": "F8_E4M3"})
    with pytest.raises(LoadError, match=r"m\.weight is stored as F8_E4M3, but has no m\.weight_scale beside it"):
        read_module(tmp_path, {"quant_method": "fp8"})
    stored = {"m_blocks": np.zeros((1, 2, 3, 16), np.int8), "m_scales": np.zeros((1, 2, 3), np.uint8)}
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match="tensor m_blocks and its scales are stored as I8 and U8"):
        read_module(tmp_path, {"quant_method": "mxfp4"})


def declare(directory: Path, config: dict[str, Any]) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))


@pytest.mark.parametrize("biased", [False, True])
def test_biases_of_packed_maps_count_unless_they_are_zero(biased: bool, tmp_path: Path) -> None:
    write(tmp_path, **({"model_type": "qwen2"} if biased else {}))
    bias = QUERY.replace("weight", "bias")
    numbers = np.random.default_rng(0).integers(0, 16, (32, 32))
    packed = {
        QUERY.replace("weight", "qweight"): words(numbers, 4, 0),
        QUERY.replace("weight", "qzeros"): words(np.full((2, 32), 7), 4, 1),
        QUERY.replace("weight", "scales"): np.ones((2, 32), np.float16),
    }
    edit(tmp_path, lambda tensors: (tensors.pop(QUERY), tensors.update(packed)))
    declare(tmp_path, GPTQ | {"sym": True})
    for value in (0, 0.5):
        edit(tmp_path, lambda tensors, value=value: tensors.update({bias: np.full(32, value, np.float16)}))
        if value and not biased:
            refused(tmp_path, rf"tensor {re.escape(bias)} of shape \[32\] has no place in the model")
            continue
        query = load(tmp_path).weights.layers[1].mixer.query
        np.testing.assert_array_equal(query.weight, numbers.T - 8)
        assert query.bias is None if not biased else (np.asarray(query.bias) == value).all()


@pytest.mark.parametrize("kind", ["F32", "F8_E8M0"])
def test_scales_of_activations_and_of_the_cache_are_dropped(kind: str, tmp_path: Path) -> None:
    write(tmp_path)
    rng, attention = np.random.default_rng(0), QUERY.removesuffix("q_proj.weight")
    numbers = np.asarray(jnp.asarray(rng.normal(0, 10, (32, 32)), jnp.float8_e4m3fn))
    exponents = rng.integers(120, 130, (2, 4)).astype(np.uint8)
    scales = np.ldexp(np.float32(1), exponents.astype(int) - 127)
    names = ("k_scale", "v_scale", "kv_scale", "q_scale", "prob_output_scale", "k_proj.k_scale", "v_proj.output_scale")
    extras = {attention + name: np.ones((), np.float32) for name in (*names, "q_proj.input_scale", "o_proj.act_scale")}
    compact = {
        QUERY: numbers.view(np.uint8),
        f"{QUERY}_scale_inv": exponents if kind == "F8_E8M0" else scales,
        **extras,
    }
    edit(tmp_path, lambda tensors: tensors.update(compact))
    declare(tmp_path, {"quant_method": "fp8", "weight_block_size": [16, 8], "kv_cache_scheme": "static"})
    float8(tmp_path, {QUERY: "F8_E4M3"} | ({f"{QUERY}_scale_inv": kind} if kind == "F8_E8M0" else {}))
    expected = numbers.astype(np.float32) * np.kron(scales, np.ones((16, 8), np.float32))
    np.testing.assert_array_equal(load(tmp_path).weights.layers[1].mixer.query.weight, expected)


def test_zero_points_of_weights_without_any_must_be_zero(tmp_path: Path) -> None:
    write(tmp_path)
    zero_point, numbers = f"{QUERY}_zero_point", np.full((32, 32), 3, np.int8)
    for value in (0, 1):
        compact = {QUERY: numbers, f"{QUERY}_scale": np.ones((32, 1), np.float32)}
        compact[zero_point] = np.full((32, 1), value, np.int8)
        edit(tmp_path, lambda tensors, compact=compact: tensors.update(compact))
        declare(tmp_path, INT8)
        if value:
            refused(tmp_path, rf"tensor {re.escape(zero_point)} of shape \[32, 1\] has no place in the model")
        else:
            np.testing.assert_array_equal(load(tmp_path).weights.layers[1].mixer.query.weight, numbers)
