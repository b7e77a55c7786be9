"""Quantization that a config.json declares: what kvjax reads, and what it refuses by name."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.models.families.family import LoadError, Settings

READ = "fp8, mxfp4, gptq, awq and compressed-tensors of 8 bits"
_FORMATS = ("int-quantized", "float-quantized", "naive-quantized")


@dataclasses.dataclass(frozen=True)
class Packing:
    """Layout of unsigned integers in words of 32 bits.

    Args:
        bits: bits of an integer: 2, 4 or 8.
        along_inputs: True if a word holds consecutive inputs of a linear map, False if it holds consecutive outputs.
        order: place in the word, from the lowest bits, of each of its integers.
        zero_offset: number to add to a stored zero point, modulo 2^bits.
    """

    bits: int
    along_inputs: bool
    order: tuple[int, ...]
    zero_offset: int


@dataclasses.dataclass(frozen=True)
class Quantization:
    """Quantization of a checkpoint's linear maps.

    Args:
        block: rows and columns that share a scale, in weights with more than one scale along an axis; None if each
            scale belongs to a row or to a whole weight.
        packing: layout of integers that share words of 32 bits; None if every number has separate bytes.
    """

    block: tuple[int, int] | None = None
    packing: Packing | None = None


def read_quantization(settings: Settings) -> Quantization | None:
    """Return the quantization that a config declares; None for a checkpoint in floating point."""
    given = settings.get("quantization_config")
    if not given:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else None
    if method == "mxfp4":
        return Quantization()
    if method == "fp8":
        return Quantization(_block(given.get("weight_block_size")))
    if method == "compressed-tensors":
        return Quantization(_block_of_groups(given))
    if method == "gptq":
        return Quantization(packing=_packing_of_gptq(given))
    if method == "awq":
        return Quantization(packing=_packing_of_awq(given))
    bits = f" ({given['bits']} bits)" if isinstance(given, dict) and "bits" in given else ""
    raise _refused(f"quant_method {method!r}{bits}")


def _refused(what: str) -> LoadError:
    return LoadError(
        f"quantization_config with {what} is not supported; kvjax reads {READ}: give such a checkpoint, a GGUF file or "
        "one with its weights in floating point."
    )


def _packing_of_gptq(given: dict[str, Any]) -> Packing:
    bits, form = given.get("bits"), given.get("checkpoint_format") or "gptq"
    if bits not in (2, 4, 8):
        raise _refused(f"gptq of {bits!r} bits")
    if form not in ("gptq", "gptq_v2") or given.get("pack_dtype", "int32") != "int32":
        raise _refused(f"gptq in checkpoint_format {form!r} and pack_dtype {given.get('pack_dtype', 'int32')!r}")
    # "-:MODULE" names modules that are not quantised; anything else has bits of its own.
    if own := [module for module in given.get("dynamic") or () if not module.startswith("-:")]:
        raise _refused(f"gptq in which modules differ (dynamic {own[0]!r})")
    return Packing(bits, along_inputs=True, order=tuple(range(32 // bits)), zero_offset=1 if form == "gptq" else 0)


def _packing_of_awq(given: dict[str, Any]) -> Packing:
    if given.get("bits") != 4:
        raise _refused(f"awq of {given.get('bits')!r} bits")
    version = str(given.get("version", "gemm")).lower()
    if version != "gemm" or not given.get("zero_point", True):
        raise _refused(f"awq of version {version!r} and zero_point {given.get('zero_point', True)!r}")
    return Packing(4, along_inputs=False, order=(0, 4, 1, 5, 2, 6, 3, 7), zero_offset=0)


def _block(given: Any) -> tuple[int, int] | None:
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != 2 or not all(isinstance(size, int) and size > 0 for size in given):
        raise _refused(f"blocks of {given!r}")
    return given[0], given[1]


def _block_of_groups(given: Any) -> tuple[int, int] | None:
    """Return the block size of a config of compressed-tensors, which all groups of linear maps must share."""
    groups = given.get("config_groups")
    if given.get("format") not in _FORMATS or not isinstance(groups, dict) or not groups:
        raise _refused(f"compressed-tensors format {given.get('format')!r}")
    blocks = {_block_of_weights(group.get("weights") if isinstance(group, dict) else None) for group in groups.values()}
    if len(blocks) > 1:
        raise _refused("groups of different blocks")
    return blocks.pop()


def _block_of_weights(weights: Any) -> tuple[int, int] | None:
    if not isinstance(weights, dict) or weights.get("num_bits") != 8 or not weights.get("symmetric", True):
        raise _refused(f"compressed-tensors weights {weights!r}")
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel", "block"):
        raise _refused(f"compressed-tensors strategy {strategy!r}")
    return _block(weights.get("block_structure")) if strategy == "block" else None
