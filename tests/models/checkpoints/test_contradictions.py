"""Quantised checkpoints whose settings and tensors contradict each other, or that lack their settings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

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
    found = read_module(tmp_path, config)
    assert found.shape == (OUT, INTO)
    for out, into in np.ndindex(OUT, INTO):
        zero = (int(parts["zeros"][groups[into], out]) + added) % 2 ** config["bits"]
        assert found[out, into] == (int(parts["numbers"][into, out]) - zero) * parts["scales"][groups[into], out]


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
    with pytest.raises(LoadError, match=r"model\.safetensors: m has both a weight and a qweight\."):
        read_module(tmp_path, PLAIN)


SCALED = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
SCALED |= {"observer": "minmax", "observer_kwargs": {}, "actorder": None, "block_structure": None, "group_size": None}
LLM_COMPRESSOR = {
    **{"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"},
    **{"global_compression_ratio": 1.5, "ignore": ["lm_head"], "sparsity_config": {}, "transform_config": {}},
    **{"kv_cache_scheme": {"num_bits": 8, "type": "float"}, "version": "0.11.0"},
    "config_groups": {
        "group_0": {
            **{"targets": ["Linear"], "weights": SCALED, "format": "float-quantized", "output_activations": None},
            "input_activations": {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"},
        }
    },
}
AUTO_GPTQ = {
    **{"bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": False, "static_groups": False, "sym": True},
    **{"true_sequential": True, "model_name_or_path": None, "model_file_base_name": None, "quant_method": "gptq"},
    "checkpoint_format": "gptq",
}
GPTQ_MODEL = {
    **{"bits": 4, "dynamic": {"-:.*lm_head": {}}, "group_size": 128, "desc_act": False, "lm_head": False},
    **{"method": "gptq", "quant_method": "gptq", "format": "gptq", "checkpoint_format": "gptq", "sym": True},
    **{"pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:5.0.0"]}},
}
AUTO_ROUND = {
    **{"bits": 4, "group_size": 128, "sym": True, "data_type": "int", "enable_quanted_input": True, "iters": 200},
    **{"enable_minmax_tuning": True, "seqlen": 2048, "batch_size": 8, "scale_dtype": "torch.float16", "lr": 0.005},
    **{"minmax_lr": 0.005, "gradient_accumulate_steps": 1, "amp": True, "nsamples": 128, "low_gpu_mem_usage": False},
    **{"autoround_version": "0.4.0", "quant_method": "gptq", "desc_act": False, "true_sequential": False},
    **{"damp_percent": 0.01, "block_name_to_quantize": "model.layers", "provider": "auto-round"},
}
DEEPSEEK = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
ONLY_CACHE = LLM_COMPRESSOR | {"format": "dense", "config_groups": {}}


@pytest.mark.parametrize(
    "config", [LLM_COMPRESSOR, ONLY_CACHE, AUTO_GPTQ, GPTQ_MODEL, AUTO_ROUND, DEEPSEEK | {"scale_fmt": "ue8m0"}]
)
def test_settings_that_tools_write_are_known(config: dict[str, Any]) -> None:
    assert read_quantization({"quantization_config": config}) is not None


@pytest.mark.parametrize("name", ["GPTQConfig", "AwqConfig", "FineGrainedFP8Config", "Mxfp4Config"])
def test_settings_of_transformers_are_known(name: str) -> None:
    import transformers

    config = getattr(transformers, name)(**{"bits": 4} if name in ("GPTQConfig", "AwqConfig") else {})
    assert read_quantization({"quantization_config": json.loads(json.dumps(config.to_dict()))}) is not None


def of_group(**changes: Any) -> dict[str, Any]:
    return LLM_COMPRESSOR | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": SCALED} | changes}}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            GPTQ | {"winding": 3},
            r"of gptq has the unknown key 'winding' \(3\), which may change what the weights stand",
        ),
        (GPTQ | {"rotation": "hadamard"}, "rotation='hadamard' is not supported for gptq"),
        (GPTQ | {"adapter": {"path": "x"}}, "adapter={'path': 'x'} is not supported for gptq"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format=True is not supported for gptq"),
        (
            GPTQ | {"checkpoint_format": "gptq", "format": "gptq_v2"},
            "'gptq' and format 'gptq_v2', which contradict each",
        ),
        (GPTQ | {"group_size": 0}, "group_size 0 is not supported"),
        (GPTQ | {"group_size": True}, "group_size True is not supported"),
        (GPTQ | {"sym": "yes"}, "sym must be true or false, not 'yes'"),
        (GPTQ | {"desc_act": 1}, "desc_act must be true or false, not 1"),
        (GPTQ | {"dynamic": ["x"]}, r"modules differ \(dynamic \['x'\]\) is not supported"),
        (AWQ | {"dynamic": {"x": {"bits": 8}}}, r"awq in which modules differ \(dynamic 'x'\) is not supported"),
        (AWQ | {"backend": "llm-awq"}, "awq of version 'llm-awq' and zero_point True is not supported"),
        (AWQ | {"pack_dtype": "int16"}, "awq in pack_dtype 'int16' is not supported"),
        (DEEPSEEK | {"fmt": "e5m2"}, "fmt='e5m2' is not supported for fp8"),
        (DEEPSEEK | {"expert_dtype": "fp4"}, "expert_dtype='fp4' is not supported for fp8"),
        (
            LLM_COMPRESSOR | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config of format 'sparse-24-",
        ),
        (LLM_COMPRESSOR | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config=.* is not supported"),
        (LLM_COMPRESSOR | {"format": "dense"}, "format 'dense', in which weights stand for others, is not supported"),
        (of_group(format="pack-quantized"), "format 'pack-quantized' is not supported"),
        (of_group(bits=2), "of a group of compressed-tensors has the unknown key 'bits'"),
        (
            of_group(weights=SCALED | {"dynamic": True}),
            "dynamic=True is not supported for weights of compressed-tensors",
        ),
        ({"quant_method": "mxfp4", "rounded": 1}, "of mxfp4 has the unknown key 'rounded'"),
    ],
)
def test_settings_that_may_change_weights_are_refused(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LoadError, match=sentence):
        read_quantization({"quantization_config": config})


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
        query = load(tmp_path).weights.layers[1].query
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
    np.testing.assert_array_equal(load(tmp_path).weights.layers[1].query.weight, expected)


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
            np.testing.assert_array_equal(load(tmp_path).weights.layers[1].query.weight, numbers)


@pytest.mark.parametrize("ending", ["qweight", "weight_packed", "weight_scale"])
@pytest.mark.parametrize(
    ("file", "remedy"),
    [
        (None, "add the settings that it was quantised with to config.json as quantization_config"),
        (
            "quantize_config.json",
            "add what quantize_config.json has to config.json as quantization_config, with its quant",
        ),
        ("hf_quant_config.json", "if quant_algo in hf_quant_config.json is FP8, add"),
    ],
)
def test_quantized_tensors_without_settings(ending: str, file: str | None, remedy: str, tmp_path: Path) -> None:
    write(tmp_path)
    if file is not None:
        (tmp_path / file).write_text("{}")
        load(tmp_path)  # the weights are floats, whatever another file says
    name = QUERY.replace("weight", ending)
    edit(tmp_path, lambda tensors: tensors.update({name: np.zeros((4, 32), np.int32)}))
    refused(
        tmp_path,
        rf"is quantised \(tensor {re.escape(name)}\), but its config.json has no quantization_config: {remedy}",
    )
    (tmp_path / "config.json").unlink()
    if file is not None:
        refused(tmp_path, r"is a quantised model without its config\.json: copy that of the model that was quantised")


@pytest.mark.parametrize(
    ("name", "declared", "sentence"),
    [
        (
            "gptq_model-4bit-128g.safetensors",
            False,
            r"but gptq_model-4bit-128g\.safetensors, which is quantised: rename it to model\.safetensors, and add what "
            r"quantize_config\.json has to config\.json as quantization_config, with its quant_method",
        ),
        (
            "weights.safetensors",
            True,
            r"but weights\.safetensors, which is quantised: rename it to model\.safetensors\.$",
        ),
        (
            "gptq_model-4bit-128g.safetensors.index.json",
            True,
            r"which is quantised: rename it to model\.safetensors\.index\.json\.$",
        ),
        (
            "gptq_model-4bit-00001-of-00002.safetensors",
            True,
            r"which is quantised: add the index of its shards as model\.safetensors\.index\.json\.$",
        ),
    ],
)
def test_quantized_files_of_other_names(name: str, declared: bool, sentence: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    if declared:
        declare(tmp_path, GPTQ)
    else:
        (tmp_path / "quantize_config.json").write_text("{}")
    refused(tmp_path, sentence)


@pytest.mark.parametrize("layout", ["one map for each expert", "two maps for each expert"])
def test_gpt_oss_with_tensors_for_each_expert(layout: str, tmp_path: Path) -> None:
    tensors = write(tmp_path, model_type="gpt_oss", head_dim=8, num_local_experts=4, num_experts_per_tok=2)
    whole = load(tmp_path)
    split = dict(tensors)
    for name in [name for name in tensors if ".experts." in name]:
        block, _, kind = name.rpartition(".experts.")
        part = "bias" if kind.endswith("_bias") else "weight"
        for expert, tensor in enumerate(split.pop(name)):
            matrix = np.ascontiguousarray(tensor.T)  # a bias stays as it is
            if "down" in kind:
                each = {"down": matrix}
            elif layout.startswith("one"):
                each = {"gate_up": matrix}
            else:
                each = {"gate": matrix[::2].copy(), "up": matrix[1::2].copy()}
            for of_map, numbers in each.items():
                one = f"{block}.experts.{of_map}_projs.{expert}.{part}"
                split[one if layout.startswith("one") else f"{block}.experts.{expert}.{of_map}_proj.{part}"] = numbers
    if layout.startswith("one"):
        split = {re.sub(r"\.router\.(\w+)$", r".router.linear.\1", name): tensor for name, tensor in split.items()}
    save_file(split, tmp_path / "model.safetensors")
    assert not set(load_file(tmp_path / "model.safetensors")) & {name for name in tensors if ".experts." in name}
    np.testing.assert_array_equal(load(tmp_path).logits([[1, 2, 3]]), whole.logits([[1, 2, 3]]))
    assert load(tmp_path, weights="int8").weights.layers[0].mlp is not None

    split.pop(next(name for name in split if ".2." in name.partition(".experts.")[2]))
    save_file(split, tmp_path / "model.safetensors")
    refused(tmp_path, r"tensor model\.layers\.\d\.mlp\.experts\..*2\..* is missing")
