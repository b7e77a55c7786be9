"""Models in several GGUF files, as llama-gguf-split writes them; the first one has the metadata of all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.models.families import LoadError

if TYPE_CHECKING:
    from gguf.gguf_reader import ReaderTensor

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
