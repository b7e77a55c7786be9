"""GGUF files: headers, and tensors that are dequantized when they are read."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvjax.models.checkpoints.gguf_architectures import ARCHITECTURES, Array, Header, Settings
from kvjax.models.checkpoints.gguf_settings import config_settings
from kvjax.models.checkpoints.gguf_tokenizer import check_split
from kvjax.models.checkpoints.tensors import Stored, Tensor
from kvjax.models.families import LoadError
from kvjax.models.weights import empty_buffer

_AT_ONCE = 1 << 16
"""Numbers dequantized per block, few enough for its temporary arrays to stay in a processor's caches."""
_PLAIN: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
}
"""Kinds of numbers that are stored as they are."""


def read_gguf(file: Path) -> tuple[Settings, dict[str, Any], Stored]:
    """Read a GGUF file, except for the values of its tensors.

    Returns:
        The settings of a Hugging Face config.json, the metadata of its tokenizer, and the tensors.
    """
    try:
        importlib.import_module("gguf")
    except ImportError:
        raise LoadError(f"reading {file} needs the package gguf: pip install 'kvjax[gguf]'.") from None
    from kvjax.models.checkpoints.gguf_reader import Reader

    try:
        reader = Reader(file)
        metadata = reader.metadata()
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError) as error:
        # At the end of a truncated file the reader fails with errors of many types.
        raise LoadError(
            f"{file} is truncated or not a GGUF file ({type(error).__name__}: {str(error).rstrip('.')}); copy or "
            "download it again."
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
        check_split(metadata)
    except ValueError as error:
        raise LoadError(f"{file}: {str(error).removesuffix('.')}.") from None
    return settings, metadata, _stored(file, name, settings, tensors, shapes)


class _Packed(NamedTuple):
    """A tensor's place in a file: its bytes begin at `offset`."""

    file: Path
    name: str
    shape: tuple[int, ...]
    offset: int
    size: int
    kind: Any

    def read(self, dtype: np.dtype) -> Array:
        """Read the tensor in its own dtype, or dequantized to the given one."""
        whole = empty_buffer(self.shape, _PLAIN.get(self.kind.name, dtype))
        rows, start = whole.reshape(-1, self.shape[-1]), 0
        for block in self.blocks():
            rows[start : start + len(block)] = block
            start += len(block)
        return whole

    def blocks(self) -> Iterator[Array]:
        """Yield blocks of rows [rows, in], dequantized to float32 if they are quantized."""
        dequantized, count = self._dequantization(), math.prod(self.shape[:-1])
        step, of_row = max(1, _AT_ONCE // self.shape[-1]), self.size // count
        with self.file.open("rb", buffering=0) as opened:
            opened.seek(self.offset)
            for start in range(0, count, step):
                rows = min(step, count - start)
                yield dequantized(np.frombuffer(opened.read(rows * of_row), np.uint8).reshape(rows, -1))

    def _dequantization(self) -> Callable[[np.ndarray], Array]:
        import gguf

        if self.kind.name in _PLAIN:
            return lambda packed: packed.view(_PLAIN[self.kind.name])
        kind = getattr(gguf.quants, self.kind.name, None)
        if kind is None:
            raise LoadError(
                f"{self.file}: tensor {self.name} is stored as {self.kind.name}, which the package gguf cannot "
                "dequantise."
            )
        # `gguf.dequantize` does the same for 16 rows at a time, which takes three times as long.
        kind.init_grid()
        return kind.dequantize_rows


def _stored(
    file: Path, name: str, settings: Settings, tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> Stored:
    import gguf

    def stored(tensor: Any) -> Tensor:
        stem = tensor.name.rpartition(".")[0].rpartition(".")[2]
        restore = ARCHITECTURES[name].restore.get(stem)
        shape, size = shapes[tensor.name], tensor.n_bytes
        # Keep no reference to the reader, which maps the whole file.
        packed = _Packed(file, tensor.name, shape, tensor.data_offset, size, tensor.tensor_type)
        if restore is None:
            return Tensor(file, shape, size, packed.read, blocks=packed.blocks)
        return Tensor(file, shape, size, lambda dtype: restore(packed.read(dtype), settings))

    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, settings["num_hidden_layers"])
    return Stored(
        file,
        "its metadata",
        {tensor.name: stored(tensor) for tensor in tensors.values()},
        rename=lambda wanted: names.get_name(wanted, try_suffixes=(".weight", ".bias")) or wanted,
    )
