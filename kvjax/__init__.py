"""kvjax: language models on a KV cache that never outgrows a fixed budget."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvjax.utils.moved import RENAMED_STATS, keep_old_names, renamed

if TYPE_CHECKING:
    from kvjax import methods as methods
    from kvjax import policies as policies
    from kvjax import testing as testing
    from kvjax.generation.speculative import speculate as speculate
    from kvjax.inference.cache import Cache as Cache
    from kvjax.inference.compress import compress as compress
    from kvjax.inference.decode import decode_step as decode_step
    from kvjax.inference.decode import decode_step_in_place as decode_step_in_place
    from kvjax.inference.decoder import Decoder as Decoder
    from kvjax.inference.decoder import decoder as decoder
    from kvjax.inference.extend import extend as extend
    from kvjax.inference.extend import prefill as prefill
    from kvjax.inference.speculation import Speculation as Speculation
    from kvjax.inference.speculation import speculation as speculation
    from kvjax.inference.state import State as State
    from kvjax.inference.state import cache_bytes as cache_bytes
    from kvjax.inference.state import full_cache_bytes as full_cache_bytes
    from kvjax.inference.state import held_positions as held_positions
    from kvjax.inference.state import put_rows as put_rows
    from kvjax.inference.state import take_rows as take_rows
    from kvjax.methods.registry import policy as policy
    from kvjax.model import Model as Model
    from kvjax.model import load as load
    from kvjax.models import ModelConfig as ModelConfig
    from kvjax.policies import AccumulatedScore as AccumulatedScore
    from kvjax.policies import HammingDistance as HammingDistance
    from kvjax.policies import OldestFirst as OldestFirst
    from kvjax.policies import Plan as Plan
    from kvjax.policies import Policy as Policy
    from kvjax.policies import Protection as Protection
    from kvjax.policies import Replay as Replay
    from kvjax.policies import Requirements as Requirements
    from kvjax.policies import Residual as Residual
    from kvjax.policies import Score as Score
    from kvjax.policies import Selection as Selection
    from kvjax.policies import Sizing as Sizing
    from kvjax.policies import SplitRanking as SplitRanking
    from kvjax.policies.codec import Codec as Codec
    from kvjax.policies.quantizer import Quantizer as Quantizer
    from kvjax.policies.stats import AttentionProbs as AttentionProbs
    from kvjax.policies.stats import AttentionSum as AttentionSum
    from kvjax.policies.stats import Damage as Damage
    from kvjax.policies.stats import LocalAttention as LocalAttention
    from kvjax.policies.stats import Noise as Noise
    from kvjax.policies.stats import Peak as Peak
    from kvjax.policies.stats import ReplayedQueries as ReplayedQueries
    from kvjax.utils.compilation import enable_compilation_cache as enable_compilation_cache

# Modules of the names above, imported on first use: a command starts fast and can be interrupted early.
_HOMES = {
    "kvjax.policies.stats": (
        "AttentionProbs",
        "AttentionSum",
        "Damage",
        "LocalAttention",
        "Noise",
        "Peak",
        "ReplayedQueries",
    ),
    "kvjax.policies.codec": ("Codec",),
    "kvjax.policies.quantizer": ("Quantizer",),
    "kvjax.utils.compilation": ("enable_compilation_cache",),
    "kvjax.generation.speculative": ("speculate",),
    "kvjax.inference.compress": ("compress",),
    "kvjax.inference.decode": ("decode_step", "decode_step_in_place"),
    "kvjax.inference.cache": ("Cache",),
    "kvjax.inference.decoder": ("Decoder", "decoder"),
    "kvjax.inference.extend": ("extend", "prefill"),
    "kvjax.inference.speculation": ("Speculation", "speculation"),
    "kvjax.inference.state": ("State", "cache_bytes", "full_cache_bytes", "held_positions", "put_rows", "take_rows"),
    "kvjax.methods": ("policy",),
    "kvjax.model": ("Model", "load"),
    "kvjax.models": ("ModelConfig",),
    "kvjax.policies": (
        "AccumulatedScore",
        "HammingDistance",
        "OldestFirst",
        "Plan",
        "Policy",
        "Protection",
        "Replay",
        "Requirements",
        "Residual",
        "Score",
        "Selection",
        "Sizing",
        "SplitRanking",
    ),
}
_NAMES = {name: home for home, names in _HOMES.items() for name in names}
_PACKAGES = ("methods", "policies", "testing")
__all__ = [*_PACKAGES, *_NAMES]  # pyright: ignore[reportUnsupportedDunderAll]


keep_old_names()


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"kvjax.{name}")
    if name in RENAMED_STATS:
        return renamed(__name__, RENAMED_STATS)(name)
    if name not in _NAMES:
        raise AttributeError(f"kvjax has no {name!r}; it has {', '.join(sorted(__all__))}.")
    value = globals()[name] = getattr(importlib.import_module(_NAMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
