"""Tensors stored in files, reading those of safetensors files, and the stored tensors of each leaf of the weights."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from kvjax.models.config import ModelConfig
from kvjax.models.families import Family, LoadError
from kvjax.models.families.family import Shape, Source
from kvjax.utils import files
from kvjax.utils.files import check_regular, damage_named

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_SIZES: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_CODES: Mapping[str, np.dtype] = {
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
    "I32": np.dtype(np.int32),
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor stored in a file.

    Args:
        file: the file that contains it.
        shape: shape in a Hugging Face checkpoint.
        size: bytes in the file.
        read: function from a dtype, and optionally a sharding, to the tensor: in its own dtype, or in the given one if
            it is quantized. With a sharding, formats whose shards can be read apart return the tensor on devices, from
            the shards needed here. It raises LoadError if the type in the file is not supported.
        kind: type in a safetensors file.
        codes: function that reads integers and numbers of 8 bits as they are; None for other types.
        blocks: function that reads some rows [rows, in] at a time, in float32 if they are quantized; None for formats
            without such reads.
    """

    file: Path
    shape: tuple[int, ...]
    size: int
    read: Callable[..., Any]
    kind: str = ""
    codes: Callable[[], np.ndarray] | None = None
    blocks: Callable[[], Iterator[np.ndarray]] | None = None

    def rows(self, dtype: np.dtype) -> Iterator[np.ndarray]:
        """Return blocks of rows, or `read(dtype)` for formats without such reads."""
        return iter([self.read(dtype)]) if self.blocks is None else self.blocks()

    def is_zero(self) -> bool:
        """Return whether all of its numbers are 0."""
        return not (self.read(np.dtype(np.float32)) if self.codes is None else self.codes()).any()


@dataclasses.dataclass(frozen=True)
class Stored:
    """All tensors of a checkpoint; only their headers have been read.

    Args:
        place: the file to name in messages about missing tensors.
        described: the source of the model's config, named in messages.
        tensors: the tensors by their names in the files.
        ours: True if the tensors are leaves of `Weights` under the leaves' names.
        rename: function from a tensor's name in a Hugging Face checkpoint to its name here.
        spare: names of tensors that a model need not have a place for if they are zero.
    """

    place: Path
    described: str
    tensors: Mapping[str, Tensor]
    ours: bool = False
    rename: Callable[[str], str] = str
    spare: frozenset[str] = frozenset()


def read_json(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        LoadError: if the file is missing, cannot be read, or contains no JSON object.
    """
    if not file.exists():
        raise LoadError(f"{file} is missing: a model directory needs it.")
    try:
        return files.read_json(file)
    except ValueError as error:
        raise LoadError(str(error)) from None


def read_safetensors(directory: Path) -> Stored:
    """Find the tensors of a Hugging Face directory."""
    files, indexed = _weight_files(directory)
    tensors: dict[str, Tensor] = {}
    for file in files:
        with _open(file) as opened:
            for name in opened.keys():  # noqa: SIM118 (the file is no dictionary and not iterable)
                if name in tensors and name not in indexed:
                    raise LoadError(
                        f"{directory}: tensor {name} is in two shards, {tensors[name].file.name} and {file.name}, and "
                        f"{INDEX} names neither; save the checkpoint anew."
                    )
                if name in tensors and indexed[name] != file.name:
                    continue
                header = opened.get_slice(name)
                tensors[name] = _tensor(file, name, tuple(header.get_shape()), header.get_dtype())
    for name, shard in indexed.items():
        if name not in tensors or tensors[name].file.name != shard:
            where = f", but {tensors[name].file.name} does" if name in tensors else ""
            raise LoadError(
                f"{directory / INDEX} places tensor {name} in {shard}, which does not hold it{where}; save the "
                "checkpoint anew."
            )
    return Stored(files[0] if len(files) == 1 else directory / INDEX, "config.json", tensors)


def _tensor(file: Path, name: str, shape: tuple[int, ...], kind: str) -> Tensor:
    """Return a tensor, which opens the file for each read: a mapped file keeps everything read from it in memory."""

    def read(dtype: np.dtype, sharding: jax.sharding.Sharding | None = None) -> np.ndarray | jax.Array:
        with _open(file) as opened:
            if kind not in _SIZES:
                raise LoadError(f"{file}: tensor {name} is stored as {kind}; supported are {', '.join(_SIZES)}.")
            if sharding is None:
                return opened.get_tensor(name)
            stored = opened.get_slice(name)
            return on_devices(shape, sharding, lambda index: stored[index].astype(dtype, copy=False))

    def codes() -> np.ndarray:
        # The reader of safetensors for NumPy knows no floats of 8 bits, so read the bytes.
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            start = json.loads(opened.read(length))[name]["data_offsets"][0]
        return np.fromfile(file, _CODES[kind], math.prod(shape), offset=8 + length + start).reshape(shape)

    size = math.prod(shape) * (_CODES[kind].itemsize if kind in _CODES else _SIZES.get(kind, 1))
    return Tensor(file, shape, size, read, kind, codes if kind in _CODES else None)


def on_devices(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding, part: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array:
    """Put an array on devices, and wait for the transfer; each part is read once, also if several devices have it."""
    parts: dict[tuple[tuple[int | None, int | None], ...], np.ndarray] = {}

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        where = tuple((axis.start, axis.stop) for axis in index)
        return parts[where] if where in parts else parts.setdefault(where, part(index))

    return jax.make_array_from_callback(shape, sharding, shard).block_until_ready()


def _open(file: Path) -> Any:
    check_regular(file, LoadError)
    with damage_named(
        f"{file} is truncated or not a safetensors file ({{reason}}); copy or download it again.", LoadError
    ):
        return safe_open(file, framework="numpy")


def _weight_files(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the checkpoint's safetensors files, and the file of each tensor in its index."""
    index = directory / INDEX
    if not index.exists():
        if not (directory / SINGLE).exists():
            raise LoadError(f"{directory} has neither {SINGLE} nor {INDEX}: only safetensors checkpoints can be read.")
        return [directory / SINGLE], {}
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise LoadError(f"{index} has no weight_map from tensor names to file names.")
    shards = sorted(set(names.values()))
    for shard in shards:
        if Path(shard).name != shard:
            raise LoadError(f"{index} names the shard {shard!r}, which is not a file name in its directory.")
        if not os.path.isfile(directory / shard):  # False also for names that the system refuses
            raise LoadError(f"{index} names the shard {shard}, which is missing from {directory}.")
    return [directory / shard for shard in shards], names


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
