"""Quantized checkpoints whose files or settings are not where a Hugging Face directory has them."""

from __future__ import annotations

import re
from pathlib import Path

from kvjax.models.checkpoints.tensors import INDEX, SINGLE, Stored
from kvjax.models.families import LoadError, Settings

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
