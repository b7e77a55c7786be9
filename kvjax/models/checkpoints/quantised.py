"""Quantized tensors of checkpoints, decoded to floating point one tensor at a time as they are read.

GPTQ, Frantar et al. 2022; AWQ, Lin et al. 2023: the layouts are those that AutoGPTQ and AutoAWQ write.
Checkpoints whose files or settings are not where a Hugging Face directory has them are refused with a remedy.
"""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int, Shaped, UInt8

from kvjax.models.checkpoints.tensors import INDEX, SINGLE, Stored, Tensor
from kvjax.models.families import LoadError, Settings
from kvjax.models.families.quantization import Packing, Quantization

_PER_BLOCK = 32
"""Numbers of an MXFP4 block, two in each byte."""
_FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_PAIRS = np.concatenate([_FP4, -_FP4])[np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=1)]
"""The two numbers of each byte, the one in the low bits first."""
_POWERS = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
"""The factor of each scale E8M0."""
_SCALES = ("_scale_inv", "_scale")
_CODES = ("F8_E4M3", "I8")
_OF_ACTIVATIONS = re.compile(
    r"(.*\.)?((activation|act|input|output|prob|prob_output|[qkv]|kv)_scale|(input|output|[qkv])_zero_point)"
)
"""Names of scales of activations and of cached keys and values, which have their own dtype here."""
_PACKED = ("qweight", "qzeros", "scales", "g_idx")
"""Tensors of a linear map whose integers share words."""


def decoded(stored: Stored, quantization: Quantization) -> Stored:
    """Return the tensors of a checkpoint with each quantized one in place of its codes, scales and zero points.

    Scales of activations and of the cache are dropped: kvjax computes with them in floating point. Zero points of
    weights whose config declares none, and biases of packed weights, count only if they are not zero.
    """
    tensors = {name: tensor for name, tensor in stored.tensors.items() if not _OF_ACTIVATIONS.fullmatch(name)}
    spare: set[str] = {name for name in tensors if name.endswith(".weight_zero_point")}

    def put(name: str, tensor: Tensor) -> None:
        if name in tensors:
            raise LoadError(f"{tensor.file}: tensor {name} is stored twice, quantised and as it is.")
        tensors[name] = tensor

    for name, tensor in stored.tensors.items():
        scale = next((name + end for end in _SCALES if name + end in stored.tensors), None)
        if name.endswith("_blocks") and (of_blocks := f"{name.removesuffix('_blocks')}_scales") in tensors:
            put(name.removesuffix("_blocks"), _of_blocks(name, tensors.pop(name), tensors.pop(of_blocks)))
        elif scale is not None and tensor.kind in _CODES:
            tensors[name] = _of_codes(name, tensor, tensors.pop(scale), quantization.block)
        elif quantization.packing is not None and name.endswith(".qweight"):
            module = name.removesuffix("qweight")
            parts = {part: tensors.pop(module + part) for part in _PACKED if module + part in tensors}
            put(f"{module}weight", _of_words(module, parts, quantization.packing))
            spare.add(f"{module}bias")  # AutoGPTQ writes one for every module
        elif tensor.kind == "F8_E4M3":
            raise LoadError(
                f"{tensor.file}: tensor {name} is stored as {tensor.kind}, but has no {name}_scale beside it."
            )
    return dataclasses.replace(stored, tensors=tensors, spare=frozenset(spare))


def _of_blocks(name: str, blocks: Tensor, scales: Tensor) -> Tensor:
    """Return a tensor of MXFP4 [experts, in, out], whose blocks [experts, out, in / 32, 16] lie along its inputs."""
    if blocks.shape != (*scales.shape, _PER_BLOCK // 2) or len(scales.shape) != 3:
        raise LoadError(
            f"{blocks.file}: tensor {name} has shape {list(blocks.shape)}, which does not fit scales of shape "
            f"{list(scales.shape)}."
        )
    if blocks.kind != "U8" or scales.kind not in ("U8", "F8_E8M0"):
        raise LoadError(f"{blocks.file}: tensor {name} and its scales are stored as {blocks.kind} and {scales.kind}.")
    experts, out, count = scales.shape

    def read(dtype: np.dtype, _: object = None) -> np.ndarray:
        assert blocks.codes is not None and scales.codes is not None
        codes, exponents = blocks.codes(), scales.codes().view(np.uint8)
        weights = np.empty((experts, out, count * _PER_BLOCK), dtype)
        for expert in range(experts):
            weights[expert] = of_mxfp4(codes[expert], exponents[expert])
        return weights.swapaxes(1, 2)

    return Tensor(blocks.file, (experts, count * _PER_BLOCK, out), blocks.size + scales.size, read)


def of_mxfp4(blocks: UInt8[np.ndarray, "out n 16"], scales: UInt8[np.ndarray, "out n"]) -> Float[np.ndarray, "out in"]:
    """Decode MXFP4 (OCP Microscaling Formats 1.0): 4-bit floats E2M1 in blocks of 32, each with a power of two.

    Args:
        blocks: two numbers in each byte, the first one in its low bits.
        scales: exponents with a bias of 127; 255 is NaN.
    """
    numbers = _PAIRS[blocks].reshape(*scales.shape, _PER_BLOCK)
    return (numbers * _POWERS[scales][..., None]).reshape(len(scales), -1)


def _of_codes(name: str, codes: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Return a weight of 8-bit floats or integers with a scale for all of it, for each row, or for each block."""
    sizes = _block_sizes(codes.shape, scales.shape, block)
    if sizes is None:
        raise LoadError(
            f"{scales.file}: scales of shape {list(scales.shape)} do not fit tensor {name} of shape "
            f"{list(codes.shape)}{'' if block is None else f' in blocks of {list(block)}'}."
        )

    def read(dtype: np.dtype, _: object = None) -> np.ndarray:
        assert codes.codes is not None
        numbers = scales.codes() if scales.kind == "F8_E8M0" and scales.codes is not None else None
        of_blocks = (scales.read(np.dtype(np.float32)) if numbers is None else numbers).astype(np.float32)
        of_blocks = of_blocks.reshape(-(-codes.shape[0] // sizes[0]), -1)
        return of_scales(codes.codes(), of_blocks, sizes, dtype)

    return Tensor(codes.file, codes.shape, codes.size + scales.size, read)


def _block_sizes(
    codes: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[int, int] | None:
    if len(codes) != 2:
        return None
    if math.prod(scales) == 1:
        return codes[0], codes[1]
    if scales in ((codes[0],), (codes[0], 1)):
        return 1, codes[1]
    fits = block is not None and scales == tuple(-(-size // part) for size, part in zip(codes, block, strict=True))
    return block if fits else None


def of_scales(
    codes: Shaped[np.ndarray, "out in"], scales: Float[np.ndarray, "n m"], sizes: tuple[int, int], dtype: np.dtype
) -> Float[np.ndarray, "out in"]:
    """Multiply codes by the scales of their blocks, some rows at a time.

    Args:
        sizes: rows and columns of a block; the last blocks may have fewer.
    """
    out, into = codes.shape
    weights, step = np.empty(codes.shape, dtype), max(1, 128 // sizes[0]) * sizes[0]
    for start in range(0, out, step):
        rows = np.arange(start, min(start + step, out))
        factors = np.repeat(scales[rows // sizes[0]], sizes[1], axis=1)[:, :into]
        weights[rows[0] : rows[-1] + 1] = codes[rows[0] : rows[-1] + 1].astype(np.float32) * factors
    return weights


def _of_words(module: str, parts: dict[str, Tensor], packing: Packing) -> Tensor:
    codes = parts["qweight"]
    for part in ("qzeros", "scales"):
        if part not in parts:
            raise LoadError(f"{codes.file}: tensor {module}qweight has no {module}{part} beside it.")
    for part in ("qweight", "qzeros", "g_idx"):
        if part in parts and parts[part].kind != "I32":
            raise LoadError(f"{codes.file}: tensor {module}{part} is stored as {parts[part].kind}, not as I32.")
    count, (groups, out) = len(packing.order), _matrix(module, parts["scales"])
    rows, columns = _matrix(module, codes)
    into, width = (rows * count, columns) if packing.along_inputs else (rows, columns * count)
    size = into if packing.group_size == -1 else packing.group_size
    expected = {"qzeros": (groups, out // count), "g_idx": (into,)}
    fits = all(parts[part].shape == shape for part, shape in expected.items() if part in parts)
    fits = fits and width == out and groups and not out % count
    if not fits or (size is None and "g_idx" not in parts and into % groups):
        shapes = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in parts.items())
        raise LoadError(f"{codes.file}: shapes of {module.removesuffix('.')} do not fit {packing.bits} bits: {shapes}.")
    if size is not None and groups != -(-into // size):
        raise LoadError(
            f"{codes.file}: {module}scales has {groups} groups, but group_size {packing.group_size} makes "
            f"{-(-into // size)} of {into} inputs."
        )

    def read(dtype: np.dtype, _: object = None) -> np.ndarray:
        integers = {name: part.codes() for name, part in parts.items() if part.codes is not None}
        sequence = np.arange(into) // (size or -(-into // groups))
        group = sequence
        if "g_idx" in integers:
            group = _groups(f"{codes.file}: {module}g_idx", integers["g_idx"], sequence, groups, packing)
        numbers = unpack(integers["qweight"], packing, axis=0 if packing.along_inputs else 1)
        zeros = unpack(integers["qzeros"], packing, axis=1).astype(np.int32)
        zeros = _zero_points(f"{codes.file}: {module}qzeros", zeros, packing)
        factors = parts["scales"].read(np.dtype(np.float32)).astype(np.float32)
        weights, step = np.empty((out, into), dtype), 256
        for start in range(0, into, step):
            of = group[start : start + step]
            weights[:, start : start + step] = ((numbers[start : start + step] - zeros[of]) * factors[of]).T
        return weights

    return Tensor(codes.file, (out, into), sum(part.size for part in parts.values()), read)


def _groups(
    name: str, index: Int[np.ndarray, " in"], sequence: Int[np.ndarray, " in"], groups: int, packing: Packing
) -> Int[np.ndarray, " in"]:
    """Return the group of each input, given the index of groups in the file.

    An index is followed even without `desc_act`, as AutoGPTQ, GPTQModel and ExLlamaV2 do. Only an index of zeros is
    none, as in ExLlamaV2 and vLLM: some tools leave it so where groups are in sequence.
    """
    if not ((index >= 0) & (index < groups)).all():
        raise LoadError(f"{name} has groups from {index.min()} to {index.max()}, but there are {groups}, from 0.")
    if groups == 1 or index.any():
        return index
    if packing.by_activation or (packing.group_size is None and len(index) % groups):
        raise LoadError(
            f"{name} puts all inputs into the first of {groups} groups: if these are in sequence, set desc_act to "
            "false in config.json, else the file is damaged."
        )
    return sequence


def _zero_points(name: str, stored: Int[np.ndarray, "n out"], packing: Packing) -> Int[np.ndarray, "n out"]:
    """Return the zero points, given the integers in the file.

    That of symmetric weights is 2^(bits - 1) in all formats and for all bits. Some tools store it as it is where the
    format asks for one less, or the reverse.
    """
    middle = 2 ** (packing.bits - 1)
    low, high = int(stored.min()), int(stored.max())
    if packing.symmetric is not False and low == high and middle - low in (0, 1):
        return np.full_like(stored, middle)
    if packing.symmetric:
        raise LoadError(
            f"{name} has integers from {low} to {high}, but sym is true, with {middle - 1} or {middle} for all: "
            "set sym to false in config.json if these are the zero points, else the file is damaged."
        )
    return (stored + packing.zero_offset) % 2**packing.bits


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


_FILES = ("quantize_config.json", "quant_config.json", "quantization_config.json")
"""Files in which AutoGPTQ, AutoAWQ and AutoRound store their settings."""
_MODELOPT = "hf_quant_config.json"
_NAMES = re.compile(r"gptq|awq|\dbit", re.IGNORECASE)
_TENSORS = re.compile(
    r".*(\.(qweight|weight_packed|weight_scale|weight_scale_inv|weight_scale_2|SCB)|_blocks|\.absmax)"
)
"""Names of tensors that only quantized checkpoints have."""


def check_weight_files(directory: Path, settings: Settings) -> None:
    """Refuse a directory whose weights have the name that a program for quantization gave them."""
    if (directory / SINGLE).exists() or (directory / INDEX).exists():
        return
    has_settings = bool(settings.get("quantization_config"))
    for file in sorted(directory.glob("*.safetensors*")):
        if _NAMES.search(file.name) or has_settings or _settings_file(directory) is not None:
            name = INDEX if file.name.endswith(".index.json") else SINGLE
            sharded = re.search(r"-\d+-of-\d+\.safetensors$", file.name)
            rename = f"add the index of its shards as {INDEX}" if sharded else f"rename it to {name}"
            missing = "" if has_settings else f", and {_remedy(directory)}"
            raise LoadError(
                f"{directory} has neither {SINGLE} nor {INDEX}, but {file.name}, which is quantised: {rename}{missing}."
            )


def check_tensors(stored: Stored, directory: Path) -> None:
    """Refuse quantized tensors of a directory whose config declares no quantization."""
    for name in sorted(stored.tensors):
        if _TENSORS.fullmatch(name):
            raise LoadError(
                f"{directory} is quantised (tensor {name}), but its config.json has no quantization_config: "
                f"{_remedy(directory)}."
            )


def _settings_file(directory: Path) -> str | None:
    return next((name for name in (*_FILES, _MODELOPT) if (directory / name).exists()), None)


def _remedy(directory: Path) -> str:
    name = _settings_file(directory)
    if name is None:
        return "add the settings that it was quantised with to config.json as quantization_config"
    if name == _MODELOPT:
        return (
            f'if quant_algo in {name} is FP8, add {{"quant_method": "fp8"}} to config.json as quantization_config; '
            "other formats of ModelOpt are not supported"
        )
    return f"add what {name} has to config.json as quantization_config, with its quant_method (gptq or awq)"
