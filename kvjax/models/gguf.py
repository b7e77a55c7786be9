"""GGUF files: their metadata as Hugging Face settings, their tensors as Hugging Face checkpoints have them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from kvjax.models.families import LoadError
from kvjax.models.stored import Stored, Tensor
from kvjax.rope import Rope, rope_frequencies

_AT_ONCE = 1 << 24
"""Numbers that are dequantised at once: float32 of them all would be several times what is asked for."""

Settings = dict[str, Any]
Restore = Callable[[Shaped[np.ndarray, "*shape"], Settings], Shaped[np.ndarray, "*shape"]]


def _unpermuted(heads: str) -> Restore:
    """Llama's queries or keys, whose rotated pairs GGUF puts side by side within each of so many heads."""

    def restore(tensor: np.ndarray, settings: Settings) -> np.ndarray:
        paired = tensor.reshape(settings[heads], -1, 2, *tensor.shape[1:])
        return paired.swapaxes(1, 2).reshape(tensor.shape)

    return restore


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How a GGUF architecture becomes a Hugging Face one.

    Args:
        model_type: the family's.
        settings: of the family, which the format leaves unsaid.
        restore: of tensors (by the stem of their name) that the format lays out anew, the way back.
    """

    model_type: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    restore: Mapping[str, Restore] = dataclasses.field(default_factory=dict)


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        "llama",
        restore={"attn_q": _unpermuted("num_attention_heads"), "attn_k": _unpermuted("num_key_value_heads")},
    ),
    "qwen2": Architecture("qwen2"),
}
"""What each `general.architecture` is."""

_NEEDED: Mapping[str, str] = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_KNOWN: Mapping[str, str] = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window",
}


def read_gguf(file: Path) -> tuple[Settings, dict[str, Any], Stored]:
    """What a GGUF file holds, read but for the tensors' numbers.

    Args:
        file: the file.

    Returns:
        The settings of a Hugging Face config.json, the metadata of its tokenizer, and the tensors.

    Raises:
        LoadError: the file is damaged, of an unknown architecture or lacks metadata, or `gguf` is not installed.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise LoadError(f"reading {file} needs the package gguf: pip install 'kvjax[gguf]'.") from None

    class Reader(GGUFReader):
        def __setattr__(self, name: str, value: Any) -> None:
            # The reader slices the file for every token, which takes a memory map three times as long as an array.
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    try:
        reader = Reader(file)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError) as error:
        # The reader finds the end of a file by whatever fails there.
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
    factors = None
    if "rope_freqs.weight" in tensors:
        factors = np.array(tensors.pop("rope_freqs.weight").data, np.float32)
    try:
        settings = _settings(name, metadata, shapes, factors)
    except LoadError as error:
        raise LoadError(f"{file}: {error}") from None
    return settings, metadata, _stored(file, name, settings, tensors, shapes)


def _settings(
    name: str,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    factors: Float[np.ndarray, " half"] | None,
) -> Settings:
    """What a Hugging Face config.json would say."""
    settings: Settings = {"model_type": ARCHITECTURES[name].model_type, **ARCHITECTURES[name].settings}
    for key, setting in {**_NEEDED, **_KNOWN}.items():
        value = metadata.get(f"{name}.{key}")
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]  # one for each layer
        if value is not None:
            settings[setting] = value
        elif key in _NEEDED:
            raise LoadError(f"metadata {name}.{key} is missing.")
    settings.setdefault("num_key_value_heads", settings["num_attention_heads"])
    settings["vocab_size"] = shapes["token_embd.weight"][0]
    settings["tie_word_embeddings"] = "output.weight" not in shapes
    settings["attention_bias"] = "blk.0.attn_q.bias" in shapes
    settings["mlp_bias"] = "blk.0.ffn_up.bias" in shapes
    ids = {role: metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos", "eot", "eom")}
    settings["bos_token_id"] = ids.pop("bos")
    settings["eos_token_id"] = sorted({token for token in ids.values() if token is not None})
    return settings | _rope(name, metadata, settings, factors)


def _rope(
    name: str, metadata: Mapping[str, Any], settings: Settings, factors: Float[np.ndarray, " half"] | None
) -> Settings:
    """RoPE's settings, and the width of heads, which GGUF tells only where it is not the usual one."""

    def get(key: str, usual: Any) -> Any:
        return metadata.get(f"{name}.rope.{key}", usual)

    theta, width = get("freq_base", 10_000.0), get("dimension_count", None)
    head_width = settings.get("head_dim", width)
    kind = get("scaling.type", "none")
    rope: Settings = {"rope_type": "default" if kind == "none" else kind, "rope_theta": theta}
    if kind != "none":
        rope["factor"] = get("scaling.factor", 1.0)
        rope["original_max_position_embeddings"] = get("scaling.original_context_length", None)
    if factors is not None:
        rope |= _llama3(theta, factors)
    if head_width is not None and width is not None and width != head_width:
        rope["partial_rotary_factor"] = width / head_width
    return {"rope_parameters": rope} | ({} if head_width is None else {"head_dim": head_width})


def _llama3(theta: float, factors: Float[np.ndarray, " half"]) -> Settings:
    """The settings that Llama 3's RoPE has, of which GGUF keeps only what they make of each frequency."""
    rope = Rope(2 * len(factors), theta, scaling="llama3", factor=float(factors.max()))
    expected = rope_frequencies(dataclasses.replace(rope, scaling="none")) / rope_frequencies(rope)
    if not np.allclose(expected, factors, rtol=1e-3):
        raise LoadError("the factors in rope_freqs.weight are not those of Llama 3, and no others are supported.")
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_positions,
    }


def _stored(
    file: Path, name: str, settings: Settings, tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> Stored:
    import gguf

    def stored(tensor: Any) -> Tensor:
        stem = tensor.name.rpartition(".")[0].rpartition(".")[2]
        restore = ARCHITECTURES[name].restore.get(stem)
        shape = shapes[tensor.name]
        # Of the reader nothing may stay: it maps the whole file.
        read = functools.partial(
            _read, file, tensor.name, tensor.data_offset, tensor.n_bytes, shape, tensor.tensor_type
        )
        return Tensor(file, shape, read if restore is None else lambda dtype: restore(read(dtype), settings))

    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, settings["num_hidden_layers"])
    return Stored(
        file,
        "its metadata",
        {tensor.name: stored(tensor) for tensor in tensors.values()},
        lambda wanted: names.get_name(wanted, try_suffixes=(".weight", ".bias")) or wanted,
    )


def _read(
    file: Path, name: str, offset: int, size: int, shape: tuple[int, ...], kind: Any, dtype: np.dtype
) -> Shaped[np.ndarray, "*shape"]:
    """A tensor's numbers, dequantised a few rows at a time if they are not plain ones."""
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
