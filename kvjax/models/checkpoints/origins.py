"""Origins of weights: the stored tensors of each leaf, and the tensor that they make."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models.checkpoints.tensors import Stored, Tensor, on_devices
from kvjax.models.config import ModelConfig
from kvjax.models.families import Family, LoadError
from kvjax.models.families.family import Shape, Source


@dataclasses.dataclass(frozen=True)
class Origin:
    """Stored tensors of a leaf of `Weights`: one, or one for each expert. `names` are those in the files."""

    source: Source
    names: tuple[str, ...]
    shape: Shape

    @property
    def part(self) -> Shape:
        """Shape of the leaf, or of one expert's part of it if each tensor is one."""
        return self.shape[1:] if "{expert}" in self.source.name else self.shape

    def expected(self, config: ModelConfig) -> Shape:
        """Return the shape that each stored tensor must have."""
        return self.part if self.source.shape is None else self.source.shape(self.part, config)

    def tensor(self, tensors: Mapping[str, Tensor], config: ModelConfig, dtype: np.dtype) -> Tensor:
        """Return the leaf, given the stored tensors; each of them is refused, as it is read, if it is damaged."""
        parts = [_checked(name, self._converted(tensors[name], config), dtype) for name in self.names]
        return parts[0] if self.part == self.shape else _stacked(parts)

    def _converted(self, tensor: Tensor, config: ModelConfig) -> Tensor:
        convert = self.source.read
        if convert is None:
            return tensor
        return Tensor(tensor.file, self.part, tensor.size, lambda dtype, *_: convert(tensor.read(dtype), config))


def _checked(name: str, tensor: Tensor, dtype: np.dtype) -> Tensor:
    """Return a tensor in a dtype that raises an error as it is read if some of its numbers are not finite."""

    def checked(numbers: Any) -> Any:
        on_host = isinstance(numbers, np.ndarray)
        numbers = numbers.astype(dtype, copy=False) if on_host else numbers
        if not (check_finite(numbers) if on_host else jnp.isfinite(numbers).all()):
            raise LoadError(f"{tensor.file}: tensor {name} has numbers that are NaN or infinite: it is damaged.")
        return numbers

    def read(_: np.dtype, *sharding: jax.sharding.Sharding) -> Any:
        return checked(tensor.read(dtype, *sharding))

    return dataclasses.replace(tensor, read=read, blocks=lambda: map(checked, tensor.rows(dtype)))


def check_finite(tensor: np.ndarray) -> bool:
    """Return whether all numbers are finite, from their bits: NumPy compares integers fast and without a copy."""
    width = tensor.dtype.itemsize
    infinity = np.array(np.inf, tensor.dtype).view(f"i{width}")
    bits = tensor.reshape(-1).view(f"i{width}")
    # Bits of positive numbers sort like the numbers, with NaN above infinity; those of negative ones as unsigned.
    positive, negative = (np.max(view, initial=0) for view in (bits, bits.view(f"u{width}")))
    sign = 1 << (8 * width - 1)
    return bool(positive < infinity and int(negative) < sign + int(infinity))


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Return one tensor of those of experts, which are read one after the other, on a mesh by the devices of each."""
    shape = (len(parts), *parts[0].shape)

    def read(dtype: np.dtype, sharding: jax.sharding.Sharding | None = None) -> np.ndarray | jax.Array:
        def of_experts(index: tuple[slice, ...]) -> np.ndarray:
            experts = parts[index[0]]
            stack = np.empty((len(experts), *shape[1:]), dtype)
            for place, expert in enumerate(experts):
                stack[place] = expert.read(dtype)
            return stack

        return of_experts((slice(None),)) if sharding is None else on_devices(shape, sharding, of_experts)

    def blocks() -> Iterator[np.ndarray]:
        for part in parts:
            assert part.blocks is not None
            yield from part.blocks()

    return Tensor(parts[0].file, shape, sum(part.size for part in parts), read, blocks=blocks)


def read_once(tensor: Tensor, uses: int) -> Tensor:
    """Return a tensor that several leaves use: it is read once and kept until the last of them."""
    cache: list[np.ndarray] = []
    later = itertools.count(uses - 1, -1)

    def read(dtype: np.dtype, _: object = None) -> np.ndarray:
        array = cache.pop() if cache else tensor.read(dtype)
        if next(later) > 0:
            cache.append(array)
        return array

    return tensor if uses == 1 else dataclasses.replace(tensor, read=read)


def spellings(name: str, base: str) -> tuple[str, ...]:
    """Return a tensor's possible names: with and without the model's prefix, and inside a multimodal model."""
    bare = name.removeprefix(base)
    return (name, bare, f"language_model.{name}", f"{base}language_model.{bare}")


def find_origins(stored: Stored, family: Family, shapes: Mapping[str, Shape]) -> dict[str, Origin]:
    """Return the origin of each leaf, given the leaves' shapes; a missing tensor has the name of the usual layout."""

    def stored_name(name: str) -> str:
        name = stored.rename(name)
        return next((x for x in spellings(name, family.base) if x in stored.tensors), name)

    def origin(leaf: str, shape: Shape) -> Origin:
        first = Source(leaf) if stored.ours else family.source(leaf)
        layouts = [Origin(s, tuple(map(stored_name, s.names(shape))), shape) for s in (first, *first.alternatives)]
        return next((layout for layout in layouts if layout.names[0] in stored.tensors), layouts[0])

    return {leaf: origin(leaf, shape) for leaf, shape in shapes.items()}
