"""GGUF files: headers, and tensors that are dequantized when they are read."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from kvjax.models.checkpoints.gguf_architectures import ARCHITECTURES, Array, Header, Settings
from kvjax.models.checkpoints.gguf_settings import config_settings
from kvjax.models.checkpoints.tensors import Stored, Tensor
from kvjax.models.families import LoadError

_AT_ONCE = 1 << 20
"""Numbers dequantized per block; its temporary arrays take several times the memory of these numbers in float32."""


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
                raise ValueError("it ends before the data that its header describes")
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
        settings = config_settings(Header(name, metadata, shapes, factors))
    except LoadError as error:
        raise LoadError(f"{file}: {error}") from None
    return settings, metadata, _stored(file, name, settings, tensors, shapes)


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
    """Read a tensor, dequantizing a few rows at a time if it is quantized."""
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
