"""GGUF files: conversion of metadata and tensors to the form of Hugging Face checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float, Shaped

from kvjax.models.checkpoints.tensors import Stored, Tensor
from kvjax.models.families import FAMILIES, LoadError
from kvjax.rope import Rope, rope_frequencies

_AT_ONCE = 1 << 24
"""Numbers dequantised per block; a float32 copy of a whole tensor would need a few times the memory of the result."""

Settings = dict[str, Any]
Array = Shaped[np.ndarray, "*shape"]
Restore = Callable[[Array, Settings], Array]


@dataclasses.dataclass(frozen=True)
class Header:
    """Header of a file.

    Args:
        name: name of the architecture.
        metadata: all metadata.
        shapes: shape of each tensor, [out, in].
        factors: the tensors that contain factors of RoPE's wavelengths [half].
    """

    name: str
    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    factors: Mapping[str, Float[np.ndarray, " half"]]

    def get(self, key: str, usual: Any = None) -> Any:
        """Return the architecture's metadata of a name; a list of equal values becomes one value."""
        value = self.metadata.get(f"{self.name}.{key}", usual)
        if isinstance(value, list) and len(set(value)) == 1:
            return value[0]  # one value for each layer
        return value


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Conversion of a GGUF architecture to a Hugging Face one.

    Args:
        model_type: the `model_type` of the family.
        reads: metadata that `adapt` reads, in addition to that of all architectures.
        adapt: function from the common settings and the header to the further settings of this architecture.
        restore: functions that undo the format's changes to tensors, by the stem of the tensor's name.
    """

    model_type: str
    reads: tuple[str, ...] = ()
    adapt: Callable[[Settings, Header], Settings] = lambda settings, header: {}
    restore: Mapping[str, Restore] = dataclasses.field(default_factory=dict)


def _unpermuted(heads: str) -> Restore:
    """Make a `Restore` for Llama's queries or keys; GGUF puts the rotated pairs of a head side by side."""

    def restore(tensor: Array, settings: Settings) -> Array:
        paired = tensor.reshape(settings[heads], -1, 2, *tensor.shape[1:])
        return paired.swapaxes(1, 2).reshape(tensor.shape)

    return restore


def _by_kv_head(tensor: Array, settings: Settings) -> Array:
    """Restore the order of fused queries, keys and values: by kind in GGUF, by KV head in GPT-NeoX and Falcon."""
    kv_heads, width = settings["num_key_value_heads"], settings["head_dim"]
    split = np.cumsum([settings["num_attention_heads"] * width, kv_heads * width])
    parts = [part.reshape(kv_heads, -1, *tensor.shape[1:]) for part in np.split(tensor, split)]
    return np.concatenate(parts, 1).reshape(tensor.shape)


def _less_one(tensor: Array, settings: Settings) -> Array:
    """Restore the norms of Gemma; GGUF adds to their weights the 1 that the model adds."""
    return tensor - 1


def _llama(settings: Settings, header: Header) -> Settings:
    """Recover the settings of Llama 3's RoPE; GGUF stores only the resulting factor of each frequency."""
    if "rope_freqs" not in header.factors:
        return {}
    factors, theta = header.factors["rope_freqs"], settings["rope_parameters"]["rope_theta"]
    rope = Rope(2 * len(factors), theta, scaling="llama3", factor=float(factors.max()))
    expected = rope_frequencies(dataclasses.replace(rope, scaling="none")) / rope_frequencies(rope)
    if not np.allclose(expected, factors, rtol=1e-3):
        raise LoadError("the factors in rope_freqs.weight are not those of Llama 3, and no others are supported.")
    llama3 = {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_positions,
    }
    return {"rope_parameters": settings["rope_parameters"] | llama3}


def _phi3(settings: Settings, header: Header) -> Settings:
    original = header.get("rope.scaling.original_context_length", settings["max_position_embeddings"])
    rope = {**settings["rope_parameters"], "original_max_position_embeddings": original}
    if header.factors and (factor := header.get("rope.scaling.attn_factor")) is not None:
        rope["attention_factor"] = factor
    if header.factors:
        lists = {f"{kind}_factor": header.factors[f"rope_factors_{kind}"].tolist() for kind in ("long", "short")}
        rope |= {"rope_type": "longrope", "factor": settings["max_position_embeddings"] / original, **lists}
    return {"rope_parameters": rope, "original_max_position_embeddings": original}


def _gemma3(settings: Settings, header: Header) -> Settings:
    pattern = header.get("attention.sliding_window_pattern", 6)
    usual = [layer % 6 != 5 for layer in range(settings["num_hidden_layers"])]
    if pattern != 6 and pattern != usual:
        raise LoadError(
            f"metadata {header.name}.attention.sliding_window_pattern is {pattern}; supported is a window in all "
            "layers but every sixth."
        )
    largest = settings["num_hidden_layers"] == 62  # only the 27B scales by hidden_size / heads
    ropes = {
        "full_attention": settings["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": header.get("rope.freq_base_swa", 10_000.0)},
    }
    return {
        "rope_parameters": ropes,
        "query_pre_attn_scalar": (
            settings["hidden_size"] // settings["num_attention_heads"] if largest else settings["head_dim"]
        ),
        "final_logit_softcapping": header.get("final_logit_softcapping"),
    }


def _falcon(settings: Settings, header: Header) -> Settings:
    heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    return {
        "new_decoder_architecture": kv_heads not in (1, heads),
        "multi_query": kv_heads == 1,
        "num_kv_heads": kv_heads,
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in header.shapes else 1,
        "ffn_hidden_size": settings["intermediate_size"],
        "layer_norm_epsilon": settings["layer_norm_eps"],
        "bias": settings["attention_bias"],
    }


def _gpt_neox(settings: Settings, header: Header) -> Settings:
    return {"use_parallel_residual": header.get("use_parallel_residual", True)}


_GEMMA_NORMS = ("attn", "attn_q", "attn_k", "post_attention", "ffn", "post_ffw", "output")
_TABLE: Mapping[str, Architecture] = {
    "llama": Architecture(
        "llama",
        (),
        _llama,
        {"attn_q": _unpermuted("num_attention_heads"), "attn_k": _unpermuted("num_key_value_heads")},
    ),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma3": Architecture(
        "gemma3_text",
        ("rope.freq_base_swa", "final_logit_softcapping", "attention.sliding_window_pattern"),
        _gemma3,
        {f"{norm}_norm": _less_one for norm in _GEMMA_NORMS},
    ),
    "phi3": Architecture("phi3", (), _phi3),
    "falcon": Architecture("falcon", (), _falcon, {"attn_qkv": _by_kv_head}),
    "gptneox": Architecture("gpt_neox", ("use_parallel_residual",), _gpt_neox, {"attn_qkv": _by_kv_head}),
}
ARCHITECTURES: Mapping[str, Architecture] = {
    name: architecture for name, architecture in _TABLE.items() if architecture.model_type in FAMILIES
}
"""Architecture of each `general.architecture`."""

_NEEDED: Mapping[str, str] = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_KNOWN: Mapping[str, str] = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window",
}


_ROPE = ("dimension_count", "freq_base", "scale_linear", "scaling.type", "scaling.factor", "scaling.attn_factor")
_ROPE += ("scaling.original_context_length", "scaling.yarn_beta_fast", "scaling.yarn_beta_slow")
_READ = (*_NEEDED, *_KNOWN, *(f"rope.{name}" for name in _ROPE), "attention.key_length", "attention.value_length")
"""Metadata read for every architecture."""
_DESCRIBES = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
"""Metadata without effect on the model."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (1,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "pooling_type": (0,),
    "residual_scale": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
}
"""Unsupported metadata, with the values that have no effect."""


def _check_keys(header: Header, head_width: int) -> None:
    """Refuse unsupported metadata of the architecture that may change what the model computes.

    Raises:
        LoadError: if there is any; the message names it.
    """
    known = {*_READ, *_DESCRIBES, *ARCHITECTURES[header.name].reads}
    for key, value in header.metadata.items():
        name = key.removeprefix(f"{header.name}.")
        if name == key or name in known or value in _NEUTRAL.get(name, ()):
            continue
        raise LoadError(f"metadata {key} ({value!r}) is not supported.")
    for name in ("attention.key_length", "attention.value_length"):
        if header.get(name, head_width) != head_width:
            raise LoadError(
                f"metadata {header.name}.{name} is {header.get(name)}, but the tensors' heads have {head_width}."
            )


def read_gguf(file: Path) -> tuple[Settings, dict[str, Any], Stored]:
    """Read a GGUF file, except for the values of its tensors.

    Args:
        file: the file.

    Returns:
        The settings of a Hugging Face config.json, the metadata of its tokenizer, and the tensors.

    Raises:
        LoadError: if the file is damaged, its architecture unknown, metadata missing, or `gguf` not installed.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise LoadError(f"reading {file} needs the package gguf: pip install 'kvjax[gguf]'.") from None

    class Reader(GGUFReader):
        def __setattr__(self, name: str, value: Any) -> None:
            # The reader slices the file for every token, which takes a memory map three times as long as an array.
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

        def _get(self, offset: int, dtype: DTypeLike, count: int = 1, *order: Any, **more: Any) -> np.ndarray:
            # Slices beyond the end of a file are empty, and a damaged header may ask for a list of 2^60 of them.
            if int(offset) + np.dtype(dtype).itemsize * int(count) > self.data.nbytes:
                raise ValueError("it ends within what its header describes")
            return super()._get(offset, dtype, count, *order, **more)

    try:
        reader = Reader(file)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError) as error:
        # At the end of a truncated file the reader fails with errors of many types.
        raise LoadError(
            f"{file} is truncated or not a GGUF file ({type(error).__name__}: {str(error).rstrip('.')})."
        ) from None
    name = str(metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise LoadError(
            f"{file}: architecture (general.architecture) {name!r} is not supported; supported are {known}."
        )
    if metadata.get("split.count", 1) > 1:
        raise LoadError(f"{file} is one of {metadata['split.count']} parts: merge them with llama-gguf-split --merge.")
    if reader.byte_order == "S":
        raise LoadError(f"{file} is of the other byte order: convert it with gguf-convert-endian.")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise LoadError(f"{file}: tensor token_embd.weight is missing.")
    shapes = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in reader.tensors}
    ropes = [name for name in tensors if name.startswith("rope_f")]
    factors = {name.removesuffix(".weight"): np.array(tensors.pop(name).data, np.float32) for name in ropes}
    try:
        settings = _settings(Header(name, metadata, shapes, factors))
    except LoadError as error:
        raise LoadError(f"{file}: {error}") from None
    return settings, metadata, _stored(file, name, settings, tensors, shapes)


def _settings(header: Header) -> Settings:
    """Return the settings that a Hugging Face config.json would have."""
    settings: Settings = {"model_type": ARCHITECTURES[header.name].model_type}
    for key, setting in {**_NEEDED, **_KNOWN}.items():
        value = header.get(key)
        if value is None and key in _NEEDED:
            raise LoadError(f"metadata {header.name}.{key} is missing.")
        if isinstance(value, list):
            raise LoadError(
                f"metadata {header.name}.{key} differs from layer to layer ({value}), which is not supported."
            )
        if key in _NEEDED and (not isinstance(value, int) or value <= 0):
            raise LoadError(f"metadata {header.name}.{key} must be an integer above 0, not {value!r}.")
        if value is not None:
            settings[setting] = value
    heads = settings["num_attention_heads"]
    settings.setdefault("num_key_value_heads", heads)
    queries = header.shapes.get("blk.0.attn_q.weight")
    width = settings["hidden_size"] // heads if queries is None else queries[0] // heads
    _check_keys(header, width)
    ids = {role: header.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos", "eot", "eom")}
    settings |= {
        "vocab_size": header.shapes["token_embd.weight"][0],
        "head_dim": width,
        "rope_parameters": _rope(header, width),
        "tie_word_embeddings": "output.weight" not in header.shapes,
        "attention_bias": any(f"blk.0.{name}.bias" in header.shapes for name in ("attn_q", "attn_qkv")),
        "mlp_bias": "blk.0.ffn_up.bias" in header.shapes,
        "bos_token_id": ids.pop("bos"),
        "eos_token_id": sorted({token for token in ids.values() if token is not None}),
    }
    return settings | ARCHITECTURES[header.name].adapt(settings, header)


def _rope(header: Header, head_width: int) -> Settings:
    """Return the settings of RoPE; as in llama.cpp, a factor without a type means linear scaling.

    Raises:
        LoadError: if the type of scaling has no attention factor but the file sets one.
    """
    width, factor = header.get("rope.dimension_count", head_width), header.get("rope.scaling.factor")
    factor = header.get("rope.scale_linear") if factor is None else factor  # the name in files of 2023
    kind = header.get("rope.scaling.type", "none" if factor in (None, 0, 1) else "linear")
    rope: Settings = {"rope_type": "default", "rope_theta": header.get("rope.freq_base", 10_000.0)}
    if width != head_width:
        rope["partial_rotary_factor"] = width / head_width
    if kind != "none":
        factor = 1.0 if factor in (None, 0) else factor
        original = header.get("rope.scaling.original_context_length")
        rope |= {"rope_type": kind, "factor": factor}
        rope |= {} if original is None else {"original_max_position_embeddings": original}
    multiplier = header.get("rope.scaling.attn_factor", 1.0)
    if kind == "yarn":
        betas = {name: header.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        rope |= {name: value for name, value in betas.items() if value is not None}
        if multiplier != 1:
            rope["attention_factor"] = multiplier * (1 + 0.1 * math.log(rope["factor"]))
    elif multiplier != 1 and kind != "longrope" and not header.factors:
        raise LoadError(
            f"metadata {header.name}.rope.scaling.attn_factor ({multiplier}) is supported of yarn and longrope alone."
        )
    return rope


def _stored(
    file: Path, name: str, settings: Settings, tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> Stored:
    import gguf

    def stored(tensor: Any) -> Tensor:
        stem = tensor.name.rpartition(".")[0].rpartition(".")[2]
        restore = ARCHITECTURES[name].restore.get(stem)
        shape = shapes[tensor.name]
        # Keep no reference to the reader, which maps the whole file.
        read = functools.partial(
            _read, file, tensor.name, tensor.data_offset, tensor.n_bytes, shape, tensor.tensor_type
        )
        return Tensor(
            file, shape, tensor.n_bytes, read if restore is None else lambda dtype: restore(read(dtype), settings)
        )

    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, settings["num_hidden_layers"])
    return Stored(
        file,
        "its metadata",
        {tensor.name: stored(tensor) for tensor in tensors.values()},
        rename=lambda wanted: names.get_name(wanted, try_suffixes=(".weight", ".bias")) or wanted,
    )


def _read(file: Path, name: str, offset: int, size: int, shape: tuple[int, ...], kind: Any, dtype: np.dtype) -> Array:
    """Read a tensor, dequantising a few rows at a time if it is quantised."""
    import gguf

    plain = {"F64": np.float64, "F32": np.float32, "F16": np.float16}.get(kind.name)
    if plain is not None:
        return np.fromfile(file, plain, math.prod(shape), offset=offset).reshape(shape)
    rows = math.prod(shape[:-1])
    numbers = np.empty((rows, shape[-1]), dtype)
    step = max(1, _AT_ONCE // shape[-1])
    for start in range(0, rows, step):
        count = min(step, rows - start)
        packed = np.fromfile(file, np.uint8, count * size // rows, offset=offset + start * size // rows)
        try:
            numbers[start : start + count] = gguf.dequantize(packed.reshape(count, -1), kind)
        except NotImplementedError:
            raise LoadError(
                f"{file}: tensor {name} is stored as {kind.name}, which the package gguf cannot dequantise."
            ) from None
    return numbers.reshape(shape)
