"""Settings of quantised checkpoints: those that tools write are known, and those that may change weights refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvjax.models import LoadError
from kvjax.models.families.quantization import read_quantization
from tests.models.checkpoints.test_quantised import AWQ, GPTQ

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
