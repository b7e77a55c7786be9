"""Quantization that a config.json declares: what kvjax reads, and what it refuses by name."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.models.families.family import LoadError, Settings

READ = "fp8, mxfp4 and compressed-tensors of 8 bits"
_FORMATS = ("int-quantized", "float-quantized", "naive-quantized")


@dataclasses.dataclass(frozen=True)
class Quantization:
    """Quantization of a checkpoint's linear maps.

    Args:
        method: `fp8`, `mxfp4` or `compressed-tensors`.
        block: rows and columns that share a scale, in weights with more than one scale along an axis; None if each
            scale belongs to a row or to a whole weight.
    """

    method: str
    block: tuple[int, int] | None = None


def read_quantization(settings: Settings) -> Quantization | None:
    """Return the quantization that a config declares; None for a checkpoint in floating point.

    Raises:
        LoadError: if kvjax does not read it; the message names the method and what is read.
    """
    given = settings.get("quantization_config")
    if not given:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else None
    if method == "mxfp4":
        return Quantization(method)
    if method == "fp8":
        return Quantization(method, _block(given.get("weight_block_size")))
    if method == "compressed-tensors":
        return Quantization(method, _block_of_groups(given))
    bits = f" ({given['bits']} bits)" if isinstance(given, dict) and "bits" in given else ""
    raise _refused(f"quant_method {method!r}{bits}")


def _refused(what: str) -> LoadError:
    return LoadError(
        f"quantization_config with {what} is not supported; kvjax reads {READ}: give such a checkpoint, a GGUF file or "
        "one with its weights in floating point."
    )


def _block(given: Any) -> tuple[int, int] | None:
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != 2 or not all(isinstance(size, int) and size > 0 for size in given):
        raise _refused(f"blocks of {given!r}")
    return given[0], given[1]


def _block_of_groups(given: Any) -> tuple[int, int] | None:
    """Return the block size of a config of compressed-tensors, after a look at all groups of linear maps."""
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
