"""OLMo 3: OLMo 2 with a window in three of four layers; only the other layers have scaled RoPE."""

from __future__ import annotations

import dataclasses

from kvjax.models.config import ModelConfig
from kvjax.models.families.family import Family, Settings
from kvjax.models.families.olmo2 import OLMO2_DEFAULTS, OLMO2_SOURCES, olmo2_config
from kvjax.models.families.settings import LAYER_TYPES, integer, read_rope, read_windows, rope_of_type, rope_parts


def _config(settings: Settings) -> ModelConfig:
    shape = olmo2_config({**settings, "rope_parameters": None, "rope_scaling": None})
    full, sliding = (read_rope(_of_type(settings, kind), shape.head_width) for kind in LAYER_TYPES)
    layers = range(integer(settings, "num_hidden_layers"))
    windows = read_windows(settings, [LAYER_TYPES[(index + 1) % 4 > 0] for index in layers])
    ropes = tuple(full if window is None else sliding for window in windows or (None,) * shape.layers)
    return dataclasses.replace(shape, rope=None, ropes=ropes, windows=windows)


def _of_type(settings: Settings, kind: str) -> Settings:
    """Return the settings with the RoPE of one type of layer; one RoPE is scaled in full layers only."""
    scaling, given = rope_parts(settings)
    full = kind == "full_attention"
    if set(given) <= set(LAYER_TYPES):
        own = rope_of_type(given, kind, scaling if full else {})
        return {**settings, "rope_parameters": own, "rope_scaling": None}
    if full:
        return settings
    theta = given.get("rope_theta", settings["rope_theta"])
    return {**settings, "rope_parameters": {"rope_theta": theta}, "rope_scaling": None}


OLMO3 = Family(
    _config,
    OLMO2_SOURCES,
    {**OLMO2_DEFAULTS, "rope_theta": 500_000.0, "sliding_window": 4096},
    only={"mlp_bias": (False,)},
)
