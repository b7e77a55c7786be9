"""EXAONE 4: norms of queries, keys and outputs; a window and RoPE in three of four layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvjax.models.config import ModelConfig
from kvjax.models.families.family import SIZES, Family, Settings
from kvjax.models.families.llama import QUERY_KEY_NORMS, llama_config
from kvjax.models.families.olmo import POST_NORM_SOURCES
from kvjax.models.families.settings import integer, periodic_windows, rotated_in_windows


def _config(settings: Settings) -> ModelConfig:
    shape = llama_config(settings, pre_norms=False, post_norms=True, query_key_norms=True)
    if settings.get("sliding_window") is None:
        return shape
    # Beside layer_types, the pattern may be a text such as LLLG.
    period = 1 if settings.get("layer_types") else integer(settings, "sliding_window_pattern")
    windows = periodic_windows(settings, period)
    return rotated_in_windows(dataclasses.replace(shape, windows=windows))


FAMILIES: Mapping[str, Family] = {
    "exaone4": Family(
        _config,
        {**POST_NORM_SOURCES, **QUERY_KEY_NORMS},
        {"hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 2, "sliding_window_pattern": 4},
        {"attention_bias": (False,), "mlp_bias": (False,)},
        looked_up=(*SIZES, "num_key_value_heads", "sliding_window"),
    ),
}
