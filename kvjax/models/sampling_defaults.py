"""Sampling settings that a checkpoint recommends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Names of the settings, as in generation_config.json."""
_GGUF = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_GGUF |= {"penalty_repeat": "repetition_penalty"}


@dataclasses.dataclass(frozen=True)
class SamplingDefaults:
    """Sampling settings that apply where a user gives none.

    The values are those of the checkpoint, and are only checked when they apply: users can replace a wrong one.

    Args:
        settings: by name; `do_sample` is False for greedy decoding.
        source: file that they are from, for messages.
    """

    settings: Mapping[str, Any] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    source: str = ""

    def replaced(self, settings: Mapping[str, Any]) -> SamplingDefaults:
        """Return the defaults with a user's own settings in place of some; None leaves a setting as it is."""
        new = {name: settings[name] for name in SETTINGS if settings.get(name) is not None}
        base = {name: value for name, value in self.settings.items() if name != "do_sample" or "temperature" not in new}
        return dataclasses.replace(self, settings=MappingProxyType(base | new))


def sampling_defaults(generation: Mapping[str, Any], source: object) -> SamplingDefaults:
    """Return the settings of a generation_config.json; null is the same as no setting."""
    settings = {name: generation[name] for name in ("do_sample", *SETTINGS) if generation.get(name) is not None}
    return SamplingDefaults(MappingProxyType(settings), str(source))


def gguf_sampling_defaults(metadata: Mapping[str, Any], source: object) -> SamplingDefaults:
    """Return the settings in the metadata of a GGUF file."""
    keys = {name: metadata.get(f"general.sampling.{key}") for key, name in _GGUF.items()}
    return sampling_defaults(keys, source)
