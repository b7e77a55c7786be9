"""Reader of the package gguf, with lists of metadata read at once."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType
from jax.typing import DTypeLike

_DEEPEST = 4
"""Maximal number of lists around a list; no known metadata has any."""
_TRUNCATED = "it ends before the data that its header describes"


class Reader(GGUFReader):
    """Reader of a file's header.

    That of the package makes several arrays for each element of a list, which takes a second for a vocabulary.
    """

    def metadata(self) -> dict[str, Any]:
        """Return all metadata."""
        return {
            name: field.parts[-1] if isinstance(field.parts[-1], list) else field.contents()
            for name, field in self.fields.items()
        }

    def _get(self, offset: int, dtype: DTypeLike, count: int = 1, *order: Any, **more: Any) -> np.ndarray:
        # Slices beyond the end of a file are empty, and a damaged header may ask for a list of 2^60 of them.
        if int(offset) + np.dtype(dtype).itemsize * int(count) > self.data.nbytes:
            raise ValueError(_TRUNCATED)
        return super()._get(offset, dtype, count, *order, **more)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY or self.byte_order == "S":
            return super()._get_field_parts(orig_offs, raw_type)
        values, end = self._values(orig_offs)
        return end - orig_offs, [values], [0], [GGUFValueType.ARRAY]

    def _values(self, start: int, depth: int = 0) -> tuple[list[Any], int]:
        """Return the values of a list, those of lists in it one after the other, and their end in the file."""
        if depth > _DEEPEST:
            raise ValueError("it has lists that are nested too deeply")
        kind, count = GGUFValueType(self._get(start, np.uint32)[0]), int(self._get(start + 4, np.uint64)[0])
        start += 12
        if kind == GGUFValueType.STRING:
            return _strings(self.data.data, start, count)
        if kind in self.gguf_scalar_to_np:
            numbers = self._get(start, self.gguf_scalar_to_np[kind], count)
            return numbers.tolist(), start + numbers.nbytes
        nested: list[Any] = []
        for _ in range(count):
            values, start = self._values(start, depth + 1)
            nested += values
        return nested, start


def _strings(data: memoryview, start: int, count: int) -> tuple[list[str], int]:
    """Return strings that follow each other in a file, each after its length in 8 bytes, and their end."""
    strings: list[str] = []
    for _ in range(count):
        first = start + 8
        start = first + int.from_bytes(data[start:first], sys.byteorder)
        if start > len(data):
            raise ValueError(_TRUNCATED)
        strings.append(str(data[first:start], "utf-8"))
    return strings, start
