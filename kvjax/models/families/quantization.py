"""Quantization that a config.json declares: what kvjax reads, and what it refuses by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from kvjax.models.families.family import LoadError, Settings
from kvjax.models.families.settings import flag

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


READ = "fp8, mxfp4, gptq, awq and compressed-tensors of 8 bits"
_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "dense")


@dataclasses.dataclass(frozen=True)
class Packing:
    """Layout of unsigned integers in words of 32 bits.

    Args:
        bits: bits of an integer: 2, 4 or 8.
        along_inputs: True if a word holds consecutive inputs of a linear map, False if it holds consecutive outputs.
        order: place in the word, from the lowest bits, of each of its integers.
        zero_offset: number to add to a stored zero point, modulo 2^bits.
        group_size: consecutive inputs that share a scale, -1 for all of them; None if only the tensors' shapes tell.
        symmetric: True if every zero point is 2^(bits - 1), False if they are as stored; None if the config does not
            tell, and zero points that are all the same may be either.
        by_activation: True if groups are not of consecutive inputs, which `g_idx` must then assign.
    """

    bits: int
    along_inputs: bool
    order: tuple[int, ...]
    zero_offset: int
    group_size: int | None = None
    symmetric: bool | None = False
    by_activation: bool = False


@dataclasses.dataclass(frozen=True)
class Quantization:
    """Quantization of a checkpoint's linear maps.

    Args:
        block: rows and columns that share a scale, in weights with more than one scale along an axis; None if each
            scale belongs to a row or to a whole weight.
        packing: layout of integers that share words of 32 bits; None if every number has separate bytes.
    """

    block: tuple[int, int] | None = None
    packing: Packing | None = None


def read_quantization(settings: Settings) -> Quantization | None:
    """Return the quantization that a config declares; None for a checkpoint in floating point."""
    config = settings.get("quantization_config")
    if not config:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else None
    method = method.lower() if isinstance(method, str) else method
    if not isinstance(method, str) or method not in _METHODS:
        bits = f" ({config['bits']} bits)" if isinstance(config, dict) and "bits" in config else ""
        raise _refused(f"quant_method {method!r}{bits}")
    check_keys(config, method)
    return _METHODS[method](config)


def _refused(what: str) -> LoadError:
    return LoadError(
        f"quantization_config with {what} is not supported; kvjax reads {READ}: give such a checkpoint, a GGUF file or "
        "one with its weights in floating point."
    )


def _of_gptq(config: dict[str, Any]) -> Quantization:
    bits, form = config.get("bits"), config.get("checkpoint_format") or config.get("format") or "gptq"
    if bits not in (2, 4, 8):
        raise _refused(f"gptq of {bits!r} bits")
    if form not in ("gptq", "gptq_v2"):
        raise _refused(f"gptq in checkpoint_format {form!r}")
    if config.get("format") not in (None, form):
        raise _refused(
            f"gptq in checkpoint_format {form!r} and format {config['format']!r}, which contradict each other"
        )
    _check_uniform(config, "gptq")
    packing = Packing(
        bits,
        along_inputs=True,
        order=tuple(range(32 // bits)),
        zero_offset=1 if form == "gptq" else 0,
        group_size=_group_size(config, "group_size"),
        symmetric=None if config.get("sym") is None else flag(config, "sym"),
        by_activation=flag(config, "desc_act"),
    )
    return Quantization(packing=packing)


def _of_awq(config: dict[str, Any]) -> Quantization:
    bits = config.get("bits", config.get("w_bit"))
    if bits != 4:
        raise _refused(f"awq of {bits!r} bits")
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    version = "llm-awq" if config.get("backend") == "llm-awq" else version
    if version != "gemm" or not config.get("zero_point", True):
        raise _refused(f"awq of version {version!r} and zero_point {config.get('zero_point', True)!r}")
    _check_uniform(config, "awq")
    size = _group_size(config, "group_size" if "group_size" in config else "q_group_size")
    return Quantization(packing=Packing(4, False, (0, 4, 1, 5, 2, 6, 3, 7), zero_offset=0, group_size=size))


def _check_uniform(config: dict[str, Any], method: str) -> None:
    """Refuse words of other sizes, and modules that are quantized in different ways."""
    words, modules = config.get("pack_dtype") or "int32", config.get("dynamic") or {}
    if words != "int32":
        raise _refused(f"{method} in pack_dtype {words!r}")
    # "-:MODULE" names modules that are not quantised; anything else has bits of its own.
    for module in modules if isinstance(modules, dict) else [modules]:
        if not isinstance(module, str) or not module.startswith("-:"):
            raise _refused(f"{method} in which modules differ (dynamic {module!r})")


def _group_size(config: dict[str, Any], key: str) -> int | None:
    size = config.get(key)
    if size is not None and (type(size) is not int or not (size == -1 or size > 0)):
        raise _refused(f"{key} {size!r}")
    return size


def _block(shape: Any) -> tuple[int, int] | None:
    if shape is None:
        return None
    if not isinstance(shape, list) or len(shape) != 2 or not all(isinstance(size, int) and size > 0 for size in shape):
        raise _refused(f"blocks of {shape!r}")
    return shape[0], shape[1]


def _of_compressed_tensors(config: dict[str, Any]) -> Quantization:
    """Return the quantization of a config of compressed-tensors, in which all groups of linear maps share a block."""
    groups, form = config.get("config_groups"), config.get("format")
    if form not in _FORMATS or not isinstance(groups, dict) or not (groups or config.get("kv_cache_scheme")):
        raise _refused(f"compressed-tensors format {form!r}")
    # A group without weights quantizes only activations.
    weighted = [
        group for group in groups.values() if not isinstance(group, dict) or group.get("weights", ...) is not None
    ]
    blocks = set(map(_block_of_group, weighted))
    if form == "dense" and blocks:
        raise _refused("compressed-tensors format 'dense', in which weights stand for others,")
    if len(blocks) > 1:
        raise _refused("groups of different blocks")
    return Quantization(blocks.pop() if blocks else None)


def _block_of_group(group: Any) -> tuple[int, int] | None:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or weights.get("num_bits") != 8 or not weights.get("symmetric", True):
        raise _refused(f"compressed-tensors weights {weights!r}")
    if group.get("format") not in (None, *_FORMATS):
        raise _refused(f"compressed-tensors format {group['format']!r}")
    check_keys(group, "a group of compressed-tensors")
    check_keys(weights, "weights of compressed-tensors")
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel", "block"):
        raise _refused(f"compressed-tensors strategy {strategy!r}")
    return _block(weights.get("block_structure")) if strategy == "block" else None


_METHODS: Mapping[str, Callable[[dict[str, Any]], Quantization]] = {
    "mxfp4": lambda config: Quantization(),
    "fp8": lambda config: Quantization(_block(config.get("weight_block_size"))),
    "compressed-tensors": _of_compressed_tensors,
    "gptq": _of_gptq,
    "awq": _of_awq,
}
"""Reader of the config of each `quant_method`."""
