"""Weights of GPTQ and AWQ, decoded to floating point one tensor at a time as they are read.

GPTQ, Frantar et al. 2022; AWQ, Lin et al. 2023. The layouts are those that AutoGPTQ and AutoAWQ write.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float, Int, UInt8

from kvjax.models.checkpoints.tensors import Stored, Tensor
from kvjax.models.families import LoadError
from kvjax.models.families.quantization import Packing

_PARTS = ("qweight", "qzeros", "scales", "g_idx")


def unpacked(stored: Stored, packing: Packing) -> Stored:
    """Return the tensors of a checkpoint with a `weight` in place of each `qweight`, `qzeros`, `scales` and `g_idx`."""
    tensors = dict(stored.tensors)
    for name in stored.tensors:
        if name.endswith(".qweight"):
            module = name.removesuffix("qweight")
            parts = {part: tensors.pop(module + part) for part in _PARTS if module + part in tensors}
            tensors[f"{module}weight"] = _weight(module, parts, packing)
    return dataclasses.replace(stored, tensors=tensors)


def _weight(module: str, parts: dict[str, Tensor], packing: Packing) -> Tensor:
    codes = parts["qweight"]
    for part in ("qzeros", "scales"):
        if part not in parts:
            raise LoadError(f"{codes.file}: tensor {module}qweight has no {module}{part} beside it.")
    for part in ("qweight", "qzeros", "g_idx"):
        if part in parts and parts[part].kind != "I32":
            raise LoadError(f"{codes.file}: tensor {module}{part} is stored as {parts[part].kind}, not as I32.")
    count, (groups, out) = packing.per_word, _matrix(module, parts["scales"])
    rows, columns = _matrix(module, codes)
    into, width = (rows * count, columns) if packing.along_inputs else (rows, columns * count)
    wanted = {"qzeros": (groups, out // count), "g_idx": (into,)}
    fits = all(parts[part].shape == shape for part, shape in wanted.items() if part in parts)
    if not fits or width != out or out % count or ("g_idx" not in parts and into % groups):
        shapes = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in parts.items())
        raise LoadError(f"{codes.file}: shapes of {module.removesuffix('.')} do not fit {packing.bits} bits: {shapes}.")

    def read(dtype: np.dtype) -> np.ndarray:
        integers = {name: part.codes() for name, part in parts.items() if part.codes is not None}
        group = integers.get("g_idx", np.arange(into) // (into // groups))
        numbers = unpack(integers["qweight"], packing, axis=0 if packing.along_inputs else 1)
        zeros = unpack(integers["qzeros"], packing, axis=1).astype(np.int32) + packing.zero_offset
        zeros %= 2**packing.bits
        return _dequantised(numbers, zeros, parts["scales"].read(np.dtype(np.float32)), group, dtype)

    return Tensor(codes.file, (out, into), sum(part.size for part in parts.values()), read)


def _matrix(module: str, tensor: Tensor) -> tuple[int, int]:
    if len(tensor.shape) != 2:
        raise LoadError(
            f"{tensor.file}: a tensor of {module.removesuffix('.')} has shape {list(tensor.shape)}, not two axes."
        )
    return tensor.shape[0], tensor.shape[1]


def unpack(words: Int[np.ndarray, "n m"], packing: Packing, axis: int) -> UInt8[np.ndarray, "n2 m2"]:
    """Return the unsigned integers in words of 32 bits, which follow each other along an axis."""
    shifts = np.array(packing.order, np.uint32) * np.uint32(packing.bits)
    words = np.moveaxis(words.view(np.uint32), axis, -1)
    numbers = words[..., None] >> shifts & np.uint32(2**packing.bits - 1)
    return np.moveaxis(numbers.astype(np.uint8).reshape(len(words), -1), -1, axis)


def _dequantised(
    numbers: UInt8[np.ndarray, "in out"],
    zeros: Int[np.ndarray, "groups out"],
    scales: Float[np.ndarray, "groups out"],
    group: Int[np.ndarray, " in"],
    dtype: np.dtype,
) -> Float[np.ndarray, "out in"]:
    whole, step = np.empty(numbers.shape[::-1], dtype), 256
    factors = scales.astype(np.float32)
    for start in range(0, len(numbers), step):
        of = group[start : start + step]
        whole[:, start : start + step] = ((numbers[start : start + step] - zeros[of]) * factors[of]).T
    return whole
