"""Interfaces of a policy's parts, and the record that joins them."""

import importlib
import warnings
from typing import Any

from kvjax.policies.allocation import Plan as Plan
from kvjax.policies.allocation import Sizing as Sizing
from kvjax.policies.allocation import Uniform as Uniform
from kvjax.policies.codec import Codec as Codec
from kvjax.policies.policy import Policy as Policy
from kvjax.policies.protection import Protection as Protection
from kvjax.policies.protection import recent_slots as recent_slots
from kvjax.policies.quantizer import Quantizer as Quantizer
from kvjax.policies.rankings import HammingDistance as HammingDistance
from kvjax.policies.rankings import OldestFirst as OldestFirst
from kvjax.policies.rankings import Ranking as Ranking
from kvjax.policies.rankings import SplitRanking as SplitRanking
from kvjax.policies.rankings import as_numbers as as_numbers
from kvjax.policies.rankings import coarse as coarse
from kvjax.policies.rankings import standardized as standardized
from kvjax.policies.residual import Residual as Residual
from kvjax.policies.residual import Selection as Selection
from kvjax.policies.residual import SlotResidual as SlotResidual
from kvjax.policies.score import UNRANKED as UNRANKED
from kvjax.policies.score import AccumulatedScore as AccumulatedScore
from kvjax.policies.score import AgeScore as AgeScore
from kvjax.policies.score import PromptScore as PromptScore
from kvjax.policies.score import Replay as Replay
from kvjax.policies.score import Requirements as Requirements
from kvjax.policies.score import Score as Score
from kvjax.policies.score import ScoreOver as ScoreOver
from kvjax.policies.score import StoredScore as StoredScore
from kvjax.policies.score import is_ranked as is_ranked
from kvjax.policies.stats import AttentionProbs as AttentionProbs
from kvjax.policies.stats import AttentionSum as AttentionSum
from kvjax.policies.stats import Damage as Damage
from kvjax.policies.stats import LocalAttention as LocalAttention
from kvjax.policies.stats import Noise as Noise
from kvjax.policies.stats import Peak as Peak
from kvjax.policies.stats import ReplayedQueries as ReplayedQueries
from kvjax.policies.stats import Seen as Seen
from kvjax.utils.moved import RENAMED_STATS, renamed

_MOVED = ("CODECS", "PAPERS", "PLANS", "REGISTRY", "RESIDUALS", "SELECTIONS", "name_of", "settings_in", "settings_of")


def __getattr__(name: str) -> Any:
    if name in RENAMED_STATS:
        return renamed(__name__, RENAMED_STATS)(name)
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"kvjax.policies.{name} has moved to kvjax.methods.{name}", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module("kvjax.methods"), name)
