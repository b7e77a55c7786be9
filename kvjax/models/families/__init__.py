"""One file per model family: how its Hugging Face config and tensor names become ours."""

from __future__ import annotations

from collections.abc import Mapping

from kvjax.models.config import ModelConfig
from kvjax.models.families.common import Family as Family
from kvjax.models.families.common import LoadError as LoadError
from kvjax.models.families.common import Settings as Settings
from kvjax.models.families.common import token_ids as token_ids
from kvjax.models.families.llama import LLAMA
from kvjax.models.families.mistral import MISTRAL
from kvjax.models.families.qwen2 import QWEN2

FAMILIES: Mapping[str, Family] = {"llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2}
"""The family of each `model_type`."""


def read_config(settings: Settings) -> tuple[Family, ModelConfig]:
    """The family and the shape of the model that a Hugging Face config.json describes.

    Args:
        settings: what stands in the file.

    Raises:
        LoadError: for an unknown architecture or a setting that kvjax does not support.
    """
    name = settings.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise LoadError(f"Architecture (model_type) {name!r} is not supported; supported are {', '.join(FAMILIES)}.")
    if settings.get("quantization_config"):
        raise LoadError("quantization_config is not supported: give the checkpoint with its weights in floating point.")
    family = FAMILIES[name]
    settings = {**family.defaults, **settings}
    for key, allowed in family.only.items():
        if settings.get(key) not in allowed:
            raise LoadError(f"{key}={settings[key]!r} is not supported for {name}; only {allowed[-1]!r} is.")
    try:
        return family, family.config(settings)
    except LoadError:
        raise
    except ValueError as error:
        raise LoadError(str(error)) from None
