"""The policies by name: the only place that knows names."""

from __future__ import annotations

from typing import Any

from kvjax.policies.base import Policy
from kvjax.policies.baseline_plus import BaselinePlus
from kvjax.policies.fastgen import FastGen
from kvjax.policies.full import Full
from kvjax.policies.h2o import H2O
from kvjax.policies.keyformer import Keyformer
from kvjax.policies.l2 import L2
from kvjax.policies.less import Less
from kvjax.policies.lightkv import LightKV
from kvjax.policies.lsh_e import LSHE
from kvjax.policies.random import Random
from kvjax.policies.scissorhands import Scissorhands
from kvjax.policies.snapkv import PyramidKV, SnapKV
from kvjax.policies.topk_oracle import TopKOracle
from kvjax.policies.tova import Tova
from kvjax.policies.window import DilatedWindow, LambdaMask, Streaming, Window

REGISTRY: dict[str, type[Policy]] = {
    "full": Full,
    "window": Window,
    "dilated_window": DilatedWindow,
    "streaming": Streaming,
    "lambda_mask": LambdaMask,
    "random": Random,
    "h2o": H2O,
    "keyformer": Keyformer,
    "tova": Tova,
    "scissorhands": Scissorhands,
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
    "lightkv": LightKV,
    "l2": L2,
    "lsh_e": LSHE,
    "topk_oracle": TopKOracle,
    "fastgen": FastGen,
    "less": Less,
    "baseline_plus": BaselinePlus,
}


def policy(name: str, **settings: Any) -> Policy:
    """A policy by name.

    Args:
        name: a key of `REGISTRY`.
        settings: the policy's own, see its class.

    Raises:
        ValueError: the name or a setting is unknown, or a value is out of range.
    """
    if name not in REGISTRY:
        raise ValueError(f"there is no policy {name!r}; choose one of {', '.join(REGISTRY)}.")
    known = settings_of(name)
    for setting in settings:
        if setting not in known and not REGISTRY[name].wraps:
            raise ValueError(f"policy {name!r} has no setting {setting!r}; it takes {', '.join(known)}.")
    return REGISTRY[name].build(**settings)


def settings_of(name: str) -> dict[str, Any]:
    """A policy's settings and their defaults."""
    return REGISTRY[name].settings()


def name_of(policy: Policy) -> str:
    """The registered name of a policy, or its class's name if it is somebody's own."""
    return next((name for name, kind in REGISTRY.items() if kind is type(policy)), type(policy).__name__)


__all__ = [
    "H2O",
    "REGISTRY",
    "FastGen",
    "Full",
    "Policy",
    "Random",
    "Streaming",
    "Window",
    "name_of",
    "policy",
    "settings_of",
]
