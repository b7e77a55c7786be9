"""Origins of weights: the stored tensors of each leaf, in the layout of the checkpoint."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
import numpy as np

from kvjax.models.checkpoints.tensors import Stored, Tensor
from kvjax.models.config import ModelConfig
from kvjax.models.families import Family
from kvjax.models.families.family import Shape, Source
from kvjax.models.weights import quantised

ReadTensor = Callable[[str, Source], np.ndarray]
"""Function from a tensor's name and the source of its leaf to the leaf, or to one expert's part of it."""
ReadBlocks = Callable[[str, Source], Iterator[np.ndarray]]
"""Function like `ReadTensor` that yields blocks of rows."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """Stored tensors of a leaf of `Weights`: one, or one for each expert. `names` are those in the files."""

    source: Source
    names: tuple[str, ...]
    shape: Shape

    @property
    def stacked(self) -> bool:
        """True if each tensor is one expert's part of the leaf."""
        return "{expert}" in self.source.name

    def expected(self, config: ModelConfig) -> Shape:
        """Return the shape that each tensor must have."""
        part = self.shape[1:] if self.stacked else self.shape
        return part if self.source.shape is None else self.source.shape(part, config)

    def read(self, read: ReadTensor, dtype: np.dtype) -> np.ndarray:
        """Read the leaf; the parts of experts go into one array, one after the other."""
        return self._experts(read, dtype, range(len(self.names))) if self.stacked else read(self.names[0], self.source)

    def place(self, read: ReadTensor, dtype: np.dtype, sharding: jax.sharding.Sharding) -> jax.Array:
        """Read the parts of experts of each device here, once, and move them to it."""
        shards: dict[tuple[int, ...], np.ndarray] = {}

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            here = range(len(self.names))[index[0]]
            if tuple(here) not in shards:
                shards[tuple(here)] = self._experts(read, dtype, here)
            return shards[tuple(here)]

        return jax.make_array_from_callback(self.shape, sharding, shard).block_until_ready()

    def read_quantised(self, read: ReadBlocks, codes: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """Read the weight of a linear map in 8 bits, and its scale; only one block at a time is in floating point."""
        blocks = (block for name in self.names for block in read(name, self.source))
        return quantised(blocks, self.shape, codes)

    def _experts(self, read: ReadTensor, dtype: np.dtype, experts: range) -> np.ndarray:
        whole = np.empty((len(experts), *self.shape[1:]), dtype)
        for index, expert in enumerate(experts):
            whole[index] = read(self.names[expert], self.source)
        return whole


class TensorReads:
    """Reads of stored tensors, each once: a tensor that several leaves share is kept until the last of them.

    Args:
        tensors: the tensors by their names in the files.
        names: names of the tensors that will be read, one for each read.
    """

    def __init__(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
        self._tensors, self._left = tensors, collections.Counter(names)
        self._kept: dict[str, np.ndarray] = {}

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Return a tensor in its own dtype, or in the given one if it is quantized."""
        tensor = self._kept.pop(name, None)
        if tensor is None:
            tensor = self._tensors[name].read(dtype)
        self._left[name] -= 1
        if self._left[name] > 0:
            self._kept[name] = tensor
        return tensor


def spellings(name: str, base: str) -> tuple[str, ...]:
    """Return a tensor's possible names: with and without the model's prefix, and inside a multimodal model."""
    bare = name.removeprefix(base)
    return (name, bare, f"language_model.{name}", f"{base}language_model.{bare}")


def find_origins(stored: Stored, family: Family, shapes: Mapping[str, Shape]) -> dict[str, Origin]:
    """Return the origin of each leaf, given the leaves' shapes; a missing tensor has the name of the usual layout."""

    def found(name: str) -> str:
        wanted = stored.rename(name)
        return next((each for each in spellings(wanted, family.base) if each in stored.tensors), wanted)

    def origin(leaf: str, shape: Shape) -> Origin:
        usual = Source(leaf) if stored.ours else family.source(leaf)
        layouts = [Origin(source, tuple(map(found, source.names(shape))), shape) for source in (usual, *usual.others)]
        return next((each for each in layouts if each.names[0] in stored.tensors), layouts[0])

    return {leaf: origin(leaf, shape) for leaf, shape in shapes.items()}
