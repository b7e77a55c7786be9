"""GGUF files: headers, and tensors that are dequantized when they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.models.checkpoints.gguf_architectures import ARCHITECTURES, Array, Header, Restore, Settings
from kvjax.models.checkpoints.gguf_kinds import check_kinds
from kvjax.models.checkpoints.gguf_parts import merge_parts, part_files
from kvjax.models.checkpoints.gguf_settings import config_settings
from kvjax.models.checkpoints.gguf_tokenizer import check_split
from kvjax.models.checkpoints.tensors import Stored, Tensor
from kvjax.models.families import LoadError
from kvjax.models.weights import empty_buffer
from kvjax.utils.files import check_regular, damage_named

if TYPE_CHECKING:
    from kvjax.models.checkpoints.gguf_reader import Reader

_AT_ONCE = 1 << 16
"""Numbers dequantized per block, few enough for its temporary arrays to stay in a processor's caches."""
_PLAIN: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
}
"""Kinds of numbers that are stored as they are."""


def _open(file: Path) -> tuple[Reader, dict[str, Any]]:
    from kvjax.models.checkpoints.gguf_reader import Reader

    check_regular(file, LoadError)
    with damage_named(f"{file} is truncated or not a GGUF file ({{reason}}); copy or download it again.", LoadError):
        reader = Reader(file)
        metadata = reader.metadata()
    if reader.byte_order == "S":
        raise LoadError(f"{file} is of the other byte order: convert it with gguf-convert-endian.")
    try:
        check_kinds(metadata)
    except ValueError as error:
        raise LoadError(f"{file}: {error}") from None
    for tensor in reader.tensors:
        if tensor.data_offset < reader.data_offset:
            raise LoadError(f"{file}: tensor {tensor.name} begins inside the header: the file is damaged.")
    return reader, metadata


def read_gguf(file: Path) -> tuple[Settings, dict[str, Any], Stored]:
    """Read a GGUF file, or all of those that the model of one of them is split into, but not the values of tensors.

    Returns:
        The settings of a Hugging Face config.json, the metadata of its tokenizer, and the tensors.
    """
    try:
        import gguf
    except ImportError:
        raise LoadError(f"reading {file} needs the package gguf: pip install 'kvjax[gguf]'.") from None

    header = _open(file)
    parts = {part: header if part == file else _open(part) for part in part_files(file, header[1])}
    file, (_, metadata) = next(iter(parts.items()))
    name = str(metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise LoadError(
            f"{file}: architecture (general.architecture) {name!r} is not supported; supported are {supported}."
        )
    tensors = merge_parts({part: (part_metadata, reader.tensors) for part, (reader, part_metadata) in parts.items()})
    if "token_embd.weight" not in tensors:
        raise LoadError(f"{file}: tensor token_embd.weight is missing.")
    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, (_, tensor) in tensors.items()}
    ropes = [name for name in tensors if name.startswith("rope_f")]
    factors = {name.removesuffix(".weight"): np.array(tensors.pop(name)[1].data, np.float32) for name in ropes}
    try:
        settings = config_settings(Header(name, metadata, shapes, factors))
        check_split(metadata)
    except ValueError as error:
        raise LoadError(f"{file}: {str(error).removesuffix('.')}.") from None
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, settings["num_hidden_layers"])
    stored = {
        tensor.name: _tensor(
            *(part, tensor.name, shapes[tensor.name], tensor.tensor_type.name, tensor.data_offset, int(tensor.n_bytes)),
            restore=ARCHITECTURES[name].restore.get(tensor.name.rpartition(".")[0].rpartition(".")[2]),
            settings=settings,
        )
        for part, tensor in tensors.values()
    }

    def rename(hf_name: str) -> str:
        return names.get_name(hf_name, try_suffixes=(".weight", ".bias")) or hf_name

    return settings, metadata, Stored(file, "its metadata", stored, rename=rename)


def _tensor(
    file: Path,
    name: str,
    shape: tuple[int, ...],
    kind: str,
    offset: int,
    size: int,
    *,
    restore: Restore | None,
    settings: Settings,
) -> Tensor:
    """Return a tensor whose bytes begin at `offset`; blocks of its rows are in float32 if they are quantized."""

    def blocks() -> Iterator[Array]:
        dequantized, count = _dequantization(file, name, kind), math.prod(shape[:-1])
        step, of_row = max(1, _AT_ONCE // shape[-1]), size // count
        with file.open("rb", buffering=0) as opened:
            opened.seek(offset)
            for start in range(0, count, step):
                rows = min(step, count - start)
                yield dequantized(np.frombuffer(opened.read(rows * of_row), np.uint8).reshape(rows, -1))

    def read(dtype: np.dtype, _: object = None) -> Array:
        array = empty_buffer(shape, _PLAIN.get(kind, dtype))
        rows, start = array.reshape(-1, shape[-1]), 0
        for block in blocks():
            rows[start : start + len(block)] = block
            start += len(block)
        return array if restore is None else restore(array, settings)

    return Tensor(file, shape, size, read, blocks=blocks if restore is None else None)


def _dequantization(file: Path, name: str, kind: str) -> Callable[[np.ndarray], Array]:
    import gguf

    if kind in _PLAIN:
        return lambda packed: packed.view(_PLAIN[kind])
    quantization = getattr(gguf.quants, kind, None)
    if quantization is None:
        raise LoadError(f"{file}: tensor {name} is stored as {kind}, which the package gguf cannot dequantise.")
    # `gguf.dequantize` does the same for 16 rows at a time, which takes three times as long.
    quantization.init_grid()
    return quantization.dequantize_rows
