"""GGUF files: types of metadata, models in several files, and tensors that are dequantized when they are read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.models.checkpoints.gguf_architectures import ARCHITECTURES, Array, Header, Restore, Settings, config_settings
from kvjax.models.checkpoints.gguf_tokenizer import check_split
from kvjax.models.checkpoints.tensors import Stored, Tensor
from kvjax.models.families import LoadError
from kvjax.models.weights import empty_buffer
from kvjax.utils.files import check_regular, damage_named

if TYPE_CHECKING:
    from gguf.gguf_reader import ReaderTensor

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
    stored: dict[str, Tensor] = {}
    for part, tensor in tensors.values():
        restore = ARCHITECTURES[name].restore.get(tensor.name.rpartition(".")[0].rpartition(".")[2])
        stored[tensor.name] = _tensor(part, tensor, shapes[tensor.name], restore, settings)

    def rename(hf_name: str) -> str:
        return names.get_name(hf_name, try_suffixes=(".weight", ".bias")) or hf_name

    return settings, metadata, Stored(file, "its metadata", stored, rename=rename)


def _tensor(
    file: Path, header: ReaderTensor, shape: tuple[int, ...], restore: Restore | None, settings: Settings
) -> Tensor:
    """Return a tensor by its header, which is not kept; blocks of its rows are in float32 if they are quantized."""
    name, kind, offset, size = header.name, header.tensor_type.name, header.data_offset, int(header.n_bytes)

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


Kind = tuple[Callable[[Any], bool], str]


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _lists(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_TEXT: Kind = (_is_text, "a text")
_ID: Kind = (_is_id, "an integer")
_FLAG: Kind = (lambda value: isinstance(value, bool), "true or false")
_TEXTS: Kind = (_lists(_is_text), "a list of texts")
_ANY_NUMBERS: Kind = (lambda value: _is_number(value) or _lists(_is_number)(value), "a number nor a list of them")
_KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(("general.architecture", "general.name", "tokenizer.chat_template"), _TEXT),
    **dict.fromkeys(("tokenizer.ggml.model", "tokenizer.ggml.pre"), _TEXT),
    "split.count": _ID,
    **dict.fromkeys(("tokenizer.ggml.tokens", "tokenizer.ggml.merges"), _TEXTS),
    "tokenizer.ggml.scores": (_lists(_is_number), "a list of numbers"),
    "tokenizer.ggml.token_type": (_lists(_is_id), "a list of integers"),
}
_ENDINGS: Mapping[str, Kind] = {
    "_token_id": _ID,
    **dict.fromkeys(("add_bos_token", "add_eos_token", "add_space_prefix"), _FLAG),
}
"""Types by the endings of names in `tokenizer.ggml`."""
_TEXTS_OF_MODELS = ("rope.scaling.type", "tensor_data_layout")
"""Metadata of architectures that are texts; all others are numbers, flags or lists of these."""


def check_kinds(metadata: Mapping[str, Any]) -> None:
    """Raise a ValueError that names the first metadata of a type that its name does not have."""
    architecture = f"{metadata.get('general.architecture')}."
    for key, value in metadata.items():
        fits, what = _kind(key, architecture)
        if not fits(value):
            shown = repr(value)
            raise ValueError(f"metadata {key} is {shown[:60]}{'...' if len(shown) > 60 else ''}, not {what}.")


def _kind(key: str, architecture: str) -> Kind:
    if key in _KINDS:
        return _KINDS[key]
    if key.startswith("tokenizer.ggml."):
        return next((kind for ending, kind in _ENDINGS.items() if key.endswith(ending)), (lambda _: True, ""))
    if not key.startswith(architecture):
        return (lambda _: True), ""
    return _TEXT if key.removeprefix(architecture) in _TEXTS_OF_MODELS else _ANY_NUMBERS


_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def part_files(file: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """Return the files of all parts in order, given one of them and its metadata; a whole model has one."""
    count, number = metadata.get("split.count", 1), metadata.get("split.no", 0) + 1
    if count <= 1:
        return [file]
    name = _NAME.fullmatch(file.name)
    if name is None or (int(name[2]), int(name[3])) != (number, count):
        raise LoadError(
            f"{file} is part {number} of {count}: its name must end in -{number:05}-of-{count:05}.gguf, and those of "
            "the other parts likewise."
        )
    files = [file.with_name(f"{name[1]}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]
    for part in files:
        if not part.is_file():
            raise LoadError(f"{part} is missing: {file.name} is one of {count} files, which belong in one directory.")
    return files


def merge_parts(
    parts: Mapping[Path, tuple[Mapping[str, Any], list[ReaderTensor]]],
) -> dict[str, tuple[Path, ReaderTensor]]:
    """Return the tensors of all parts with their files, given the metadata and the tensors of each part in order."""
    tensors: dict[str, tuple[Path, ReaderTensor]] = {}
    for number, (file, (metadata, of_part)) in enumerate(parts.items()):
        place = metadata.get("split.no", 0), max(1, metadata.get("split.count", 1))
        if place != (number, len(parts)):
            raise LoadError(
                f"{file} is part {place[0] + 1} of {place[1]} by its metadata, which contradicts its name: download "
                "the parts again."
            )
        for tensor in of_part:
            if tensor.name in tensors:
                raise LoadError(f"{file}: tensor {tensor.name} is also in {tensors[tensor.name][0].name}.")
            tensors[tensor.name] = file, tensor
    file, (metadata, _) = next(iter(parts.items()))
    if metadata.get("split.tensors.count", len(tensors)) != len(tensors):
        raise LoadError(
            f"{file} is the first of {len(parts)} parts with {metadata['split.tensors.count']} tensors, but they have "
            f"{len(tensors)}: download them again."
        )
    return tensors
