"""Keys of `quantization_config`: those that are read, those that have one supported value, and those without effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.models.families.family import LoadError, Settings

_MODULES = (
    *("modules_to_not_convert", "modules_to_convert", "ignored_layers", "ignore", "targets", "lm_head"),
    *("block_name_to_quantize", "to_quant_block_names", "quant_block_list", "modules_in_block_to_quantize"),
    "module_name_preceding_first_block",
)
"""Lists of modules: the tensors themselves tell which ones are quantized."""
_ACTIVATIONS = (
    *("activation_scheme", "input_activations", "output_activations", "kv_cache_scheme", "kv_cache_quant_method"),
    *("act_bits", "act_data_type", "act_dynamic", "act_group_size", "act_sym"),
)
"""Quantization of activations and of the cache: products and the cache have their own dtype here."""
_SEARCH = (
    *("damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "act_group_aware", "hyb_act", "mse"),
    *("v2", "v2_alpha", "gptaq", "gptaq_alpha", "foem", "hessian", "failsafe", "fallback", "observer"),
    *("observer_kwargs", "quantization_status", "global_compression_ratio", "dataset", "tokenizer", "batch_size"),
    *("train_bs", "seqlen", "model_seqlen", "nsamples", "n_samples", "iters", "lr", "minmax_lr", "amp", "pad_token_id"),
    *("gradient_accumulate_steps", "enable_quanted_input", "enable_minmax_tuning", "enable_norm_bias_tuning"),
    *("cache_block_outputs", "low_gpu_mem_usage", "model_free", "super_bits", "super_group_size"),
)
"""How the stored numbers were found."""
_PROGRAMS = (
    *("quant_method", "meta", "provider", "producer", "autoround_version", "model_name_or_path"),
    *("model_file_base_name", "backend", "device", "use_exllama", "disable_exllama", "exllama_config", "use_triton"),
    *("use_cuda_fp16", "max_input_length", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "dequantize"),
    *("run_compressed", "use_optimized_inference", "offload_to_disk", "offload_to_disk_path", "pack_impl"),
    *("parallel_packing", "scale_dtype", "zp_dtype", "scale_fmt"),
)
"""Programs that wrote or read the checkpoint, and types that the tensors have anyway."""
_HARMLESS = frozenset((*_MODULES, *_ACTIVATIONS, *_SEARCH, *_PROGRAMS))

_PACKED = ("bits", "group_size", "format", "pack_dtype", "dynamic", "sym", "desc_act")
_READ: Mapping[str, tuple[str, ...]] = {
    "mxfp4": (),
    "fp8": ("weight_block_size",),
    "compressed-tensors": ("config_groups", "format", "version"),
    "a group of compressed-tensors": ("weights", "format"),
    # Activation order is one of groups, which are refused by their strategy.
    "weights of compressed-tensors": (
        *("num_bits", "type", "symmetric", "strategy", "block_structure", "group_size", "actorder"),
    ),
    "gptq": (*_PACKED, "checkpoint_format"),
    # transformers writes the defaults of GPTQ's `sym` and `desc_act` into configs of AWQ, which has neither.
    "awq": (*_PACKED, "w_bit", "q_group_size", "zero_point", "version"),
}
"""Keys of each method that its reader looks at."""
_NONE: tuple[Any, ...] = (None, {}, [])
_ONLY_PACKED: Settings = {
    "rotation": _NONE,
    "rotation_config": _NONE,
    "adapter": _NONE,
    "extra_config": _NONE,
    "data_type": (None, "int"),
}
_ONLY: Mapping[str, Settings] = {
    "fp8": {
        "fmt": (None, "e4m3", "float8_e4m3fn", "float8_e4m3"),
        "expert_dtype": (None, "fp8"),
        "method": (None, "fp8"),
    },
    "compressed-tensors": {"transform_config": (*_NONE, {"config_groups": {}})},
    "weights of compressed-tensors": {"dynamic": (None, False)},
    "gptq": {"is_marlin_format": (None, False), "method": (None, "gptq"), **_ONLY_PACKED},
    "awq": {"method": (None, "awq"), **_ONLY_PACKED},
}
"""Supported values of keys that have no other ones."""


def check_keys(config: Settings, method: str) -> None:
    """Refuse keys that may change what the weights stand for: unknown ones, and unsupported values of known ones.

    Args:
        config: `quantization_config`, or a part of one.
        method: name of the method, or of the part.
    """
    only = _ONLY.get(method, {})
    for key, value in config.items():
        if key == "sparsity_config" and method == "compressed-tensors":
            if isinstance(value, dict) and value.get("format") not in (None, "dense"):
                raise LoadError(
                    f"quantization_config with sparsity_config of format {value['format']!r} is not supported."
                )
        elif key in only:
            if value not in only[key]:
                raise LoadError(f"quantization_config with {key}={value!r} is not supported for {method}.")
        elif key not in _READ[method] and key not in _HARMLESS:
            raise LoadError(
                f"quantization_config of {method} has the unknown key {key!r} ({value!r}), which may change what the "
                "weights stand for; remove it from config.json if it does not."
            )
